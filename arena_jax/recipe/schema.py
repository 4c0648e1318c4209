"""The sections and keys of a recipe, with their types, defaults and meaning."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from arena_jax.events import EXPERIMENT
from arena_jax.recipe.text import dump_yaml

DType = Literal["float16", "bfloat16", "float32", "float64"]
Fraction = Field(ge=0, lt=1)

# Options of each optimizer, as optax names them; learning rate and weight decay have keys of their own.
OPTIMIZERS: dict[str, tuple[str, ...]] = {
    "adamw": ("b1", "b2", "eps", "nesterov"),
    "adam": ("b1", "b2", "eps", "nesterov"),
    "sgd": ("momentum", "nesterov"),
    "lion": ("b1", "b2"),
    "lamb": ("b1", "b2", "eps"),
    "rmsprop": ("decay", "eps", "momentum", "nesterov"),
    "adafactor": (
        *("min_dim_size_to_factor", "decay_rate", "decay_offset", "multiply_by_parameter_scale"),
        *("clipping_threshold", "momentum", "eps", "factored"),
    ),
}
# optax's own functions of these decay the weights; the others get a term of their own.
DECAYING = frozenset({"adamw", "lion", "lamb"})


class Section(BaseModel):
    """Base of all sections: frozen, strictly typed, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSection(BaseModel):
    """Which model, and every field of its ``Config`` as a key beside it.

    Attributes:
        name: a bundled model.
        file: the user's own model file, instead of a name.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    name: str | None = None
    file: str | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The keys that are fields of the model's ``Config``."""
        return dict(self.model_extra or {})


class DataSection(Section):
    """Where samples come from.

    Attributes:
        kind: ``stdlib`` (Python's own source as bytes), ``text`` (own files as bytes), ``tokens`` (own
            token file), ``digits``, ``images`` (shapes to plan with, no data), ``function`` (own loader).
        sequence_length: tokens per sample; ``None`` is the model's.
        validation_fraction: share of the data kept for validation.
        objective: predict the next token, or hidden ones.
        mask_rate, mask_token: for ``masked``: share of positions hidden, and the id that hides them.
        files: for ``text``: globs.
        path, dtype: for ``tokens``: a ``.npy`` file, or a ``.bin`` file of that integer dtype.
        function: for ``function``: ``module:name`` or ``file.py:name``, called with ``global_batch``,
            ``seed`` and ``split``, returns an iterable of global batches.
    """

    kind: Literal["stdlib", "text", "tokens", "digits", "images", "function"] = "stdlib"
    sequence_length: PositiveInt | None = None
    validation_fraction: float = Field(default=0.05, ge=0, le=0.5)
    objective: Literal["next", "masked"] = "next"
    mask_rate: float = Field(default=0.15, gt=0, lt=1)
    mask_token: NonNegativeInt = 256
    files: list[str] = []
    path: str | None = None
    dtype: Literal["uint8", "uint16", "uint32", "int32", "int64"] = "uint16"
    function: str | None = None


class OptimizerSection(Section):
    """An optax optimizer, its schedule, and what wraps it.

    Attributes:
        name: the optimizer.
        learning_rate: peak of the schedule.
        schedule: ``constant``, ``cosine`` or ``linear`` decay, after a linear warm-up.
        warmup_steps: steps from zero to the peak.
        decay_steps: step at which the decay ends; ``None`` is the last step of the run.
        final_fraction: learning rate at the end, as a share of the peak.
        weight_decay: strength; biases and normalisation scales are never decayed.
        clip_norm: bound on the global gradient norm; ``None`` does not clip.
        accumulate_steps: apply the mean of so many steps' gradients at once (``optax.MultiSteps``).
        options: further arguments of the optimizer, as optax names them.
    """

    name: Literal["adamw", "adam", "sgd", "lion", "lamb", "rmsprop", "adafactor"] = "adamw"
    learning_rate: PositiveFloat = 1e-3
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | None = None
    final_fraction: float = Field(default=0.1, ge=0, le=1)
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: PositiveFloat | None = None
    accumulate_steps: PositiveInt = 1
    options: dict[str, bool | int | float | None] = {}


class PlanSection(Section):
    """Pins on the plan; what is left alone is searched.

    Attributes:
        grid: allocation or grid shape, as ``a100:2x4/s2``; ``None`` takes the devices there are.
        stages: number of pipeline stages.
        dp, tp: data and tensor parallel sizes, one number or one per stage.
        zero: 0 none, 1 optimizer state, 2 and gradients, 3 and parameters sharded over dp.
        remat: recompute each stage's forward pass in its backward pass.
        space: ``full``, or ``alpa``: Alpa's layer units and no ZeRO.
        num_microbatches: ``None`` is automatic.
        engine: which solver: ``highs``, ``alpa`` (Alpa's own code), or ``both``, compared.
        axis_rules: axis names of the model's sharding annotations -> dp, tp, or null for one that shards nothing.
        specs: name or pattern of parameters -> how they have to lie, dim by dim; every plan keeps it.
    """

    grid: str | None = None
    stages: PositiveInt | None = None
    dp: PositiveInt | list[PositiveInt] | None = None
    tp: PositiveInt | list[PositiveInt] | None = None
    zero: Literal["search", 0, 1, 2, 3] = "search"
    remat: Literal["search", "on", "off"] = "search"
    space: Literal["full", "alpa"] = "full"
    num_microbatches: PositiveInt | None = None
    engine: Literal["highs", "alpa", "both"] = "highs"
    axis_rules: dict[str, Literal["dp", "tp"] | None] = {}
    specs: dict[str, list[str | list[str] | None]] = {}


class PrecisionSection(Section):
    """Dtypes of a run; ``None`` leaves the model's own choice (see ``arena_jax.grid.Precision``)."""

    parameter: DType | None = None
    compute: DType | None = None
    accumulation: DType = "float32"
    output: DType = "float32"


class CheckpointSection(Section):
    """``every`` steps a checkpoint (0 = none), in ``dir`` (``None``: the run's folder), the last ``keep`` kept."""

    every: NonNegativeInt = 0
    dir: str | None = None
    keep: PositiveInt = 3


class TrackingSection(Section):
    """MLflow: on or off, where (``None``: MLflow's own default), and under which experiment."""

    enabled: bool = True
    uri: str | None = None
    experiment: str = EXPERIMENT


class EvalSection(Section):
    """Validation ``every`` steps (0 = never), on so many ``batches`` (``None``: the whole split)."""

    every: NonNegativeInt = 0
    batches: PositiveInt | None = 10


class HookSection(Section):
    """What may change the allocation; at most one of the three.

    Attributes:
        script: ``"STEP: GRID"`` lines.
        script_waits: whether the run stands still at a line's step until its plan is compiled, so that the
            script always does the same; otherwise it trains on meanwhile.
        socket: path of the socket that ``arena-jax resize`` speaks to; ``auto`` is one in the run's
            directory, unless there is a script or a file; ``off`` is none.
        file: a file that is read when the process gets SIGUSR1; its first line is a grid, ``pause`` or ``stop``.
    """

    script: list[str] = []
    script_waits: bool = True
    socket: str = "auto"
    file: str | None = None


class Recipe(Section):
    """One training job.

    Attributes:
        name: what the run is called; the file's name unless it says otherwise.
        summary: one line for ``arena-jax ls``.
        function: the Python function that makes the job, for a recipe that is one.
        model, data, optimizer: what is trained, on what, and how.
        loss: the model file's ``loss_fn`` (``None``), or ``module:function`` or ``file.py:function``.
        global_batch: samples per step, over all devices.
        steps: optimizer steps.
        seed: of initialisation, sample order, masks and dropout.
        plan, precision, checkpoint, tracking, eval, hook: see the sections.
        cpu_devices: virtual devices to train on where there is only a CPU.
        nonfinite: what a NaN or infinite loss does: ``stop``, or ``skip`` the update.
    """

    name: str
    summary: str = ""
    function: str | None = None
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    optimizer: OptimizerSection = OptimizerSection()
    loss: str | None = None
    global_batch: PositiveInt = 32
    steps: PositiveInt = 100
    seed: int = Field(default=0, ge=0, lt=1 << 32)
    plan: PlanSection = PlanSection()
    precision: PrecisionSection = PrecisionSection()
    cpu_devices: PositiveInt = 8
    checkpoint: CheckpointSection = CheckpointSection()
    tracking: TrackingSection = TrackingSection()
    eval: EvalSection = EvalSection()
    hook: HookSection = HookSection()
    nonfinite: Literal["stop", "skip"] = "stop"

    @property
    def model_file(self) -> Path | None:
        """The file of the model; ``None`` for a recipe that is a function."""
        from arena_jax.bundled import model_path

        if self.model.file:
            return Path(self.model.file)
        return model_path(self.model.name) if self.model.name else None

    def resolved(self) -> dict[str, Any]:
        """Return plain values with every default filled in, the model's too."""
        from arena_jax.recipe.model_config import config_schema

        values = self.model_dump()
        path = self.model_file
        if path is not None:
            names = {key: values["model"][key] for key in ("name", "file") if values["model"][key] is not None}
            defaults = {k: f.default for k, f in config_schema(path).model_fields.items() if not f.is_required()}
            values["model"] = {**names, **_lists(defaults | self.model.config)}
        return values

    def to_yaml(self) -> str:
        """Return :meth:`resolved` as YAML, which loads back to an equal recipe."""
        return dump_yaml(self.resolved())


def _lists(values: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
