"""The plans that are compared with one device, and the variations of the tiny recipes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import permutations, product

from arena_jax.grid import GridShape, Submesh, logical_meshes, tilings

GLOBAL_BATCH = 48
NUM_MICROBATCHES = 2
GRIDS = ("cpu:1", "cpu:2", "cpu:4", "cpu:6", "cpu:8")
MAX_STAGES = 4

# The tiny recipes, made smaller still, so that several hundred plans compile in an hour.
SMALL = {
    "gpt": ("model.sequence_length=16", "model.hidden=32"),
    "bert": ("model.sequence_length=16", "model.hidden=32"),
    "moe": ("model.sequence_length=16", "model.hidden=32", "model.feed_forward=64", "model.expert_group_size=16"),
    "wide_resnet": ("model.blocks=[1,1,1]", "model.base_channels=8"),
}

Stages = tuple[tuple[Submesh, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One plan of one variation of a recipe.

    Attributes:
        model: key of :data:`SMALL`.
        variation: overrides on top of it, or a named change of optimizer or filter.
        stages: per stage its submesh, dp and tp.
        num_blocks: of a transformer; ``None`` for as many as its recipe has.
    """

    model: str
    grid: str
    stages: Stages
    zero: int = 0
    remat: bool = False
    variation: str = ""
    num_microbatches: int = NUM_MICROBATCHES
    precision: str = "float64"
    num_blocks: int | None = None

    @property
    def key(self) -> str:
        layout = "+".join(f"{dp}x{tp}" for _, dp, tp in self.stages)
        extra = (
            f" zero{self.zero}" * bool(self.zero) + " remat" * self.remat + f" {self.variation}" * bool(self.variation)
        )
        extra += "" if self.num_blocks is None else f" {self.num_blocks} blocks"
        return f"{self.model} {self.precision} {self.grid}/s{len(self.stages)} {layout} M{self.num_microbatches}{extra}"


def rows_fit(dp: int, num_microbatches: int) -> bool:
    return GLOBAL_BATCH // num_microbatches % dp == 0


@cache
def layouts(grid: str, num_microbatches: int = NUM_MICROBATCHES) -> tuple[Stages, ...]:
    """All (dp, tp) of one stage; for more the uniform ones and three with unlike stages."""
    found: list[Stages] = []
    for num_stages in range(1, MAX_STAGES + 1):
        try:
            shape = GridShape.parse(f"{grid}/s{num_stages}")
        except ValueError:
            continue
        for tiling in tilings(shape):
            found.extend(_layouts_of(tiling, num_microbatches))
    return tuple(found)


def _layouts_of(tiling: tuple[Submesh, ...], num_microbatches: int) -> Iterator[Stages]:
    meshes = {s: [m for m in logical_meshes(s.num_devices) if rows_fit(m[0], num_microbatches)] for s in tiling}
    if len(tiling) == 1:
        yield from (((tiling[0], *mesh),) for mesh in meshes[tiling[0]])
        return
    orders = sorted(set(permutations(tiling)), reverse=True)
    every = [
        tuple((s, *mesh) for s, mesh in zip(order, choice, strict=True))
        for order in orders
        for choice in product(*(meshes[s] for s in order))
    ]
    uniform = [stages for stages in every if len(set(stages)) == 1]
    unlike = [stages for stages in every if len(set(stages)) > 1]
    yield from uniform
    # Spread over the list, so that the three differ from each other as much as may be.
    step = max(1, len(unlike) // 3)
    yield from unlike[::step][:3]


def full_matrix(precision: str) -> list[Case]:
    """Every grid and layout of the four models."""
    return [
        Case(model=model, grid=grid, stages=stages, precision=precision)
        for model in SMALL
        for grid in GRIDS
        for stages in layouts(grid)
    ]


# What else must not change the numbers, on GPT. Names are resolved in run.py.
VARIATIONS = (
    "dropout",
    "clip",
    "scan",
    "model-remat",
    "untied",
    "frozen",
    "weighted",
    "multisteps",
    "apply_if_finite",
    "masked",
    "adafactor",
)


def variation_cases() -> list[Case]:
    """Every variation on one-stage, two-stage and unlike plans; free numbers of microbatches."""
    plans = {
        "cpu:4": [(2, 2)],
        "cpu:2": [(1, 1), (1, 1)],
        "cpu:8": [(2, 2), (4, 1)],
        "cpu:6": [(2, 1), (1, 2), (2, 1)],
    }
    cases = []
    for name in VARIATIONS:
        for grid, meshes in plans.items():
            stages = tuple((Submesh(1, dp * tp), dp, tp) for dp, tp in meshes)
            cases.append(Case(model="gpt", grid=grid, stages=stages, variation=name))
    # dp must divide the rows of a microbatch, so few rows go to few devices.
    for count in (1, 4, 12):
        for name in ("", "weighted"):
            stages = ((Submesh(1, 2), 2, 1), (Submesh(1, 2), 1, 2))
            cases.append(Case(model="gpt", grid="cpu:4", stages=stages, variation=name, num_microbatches=count))
    for case in list(cases[:4]):
        cases.append(replace(case, remat=True, zero=1 + len(cases) % 3))
    return cases


def pairwise_matrix(limit: int = 28) -> list[Case]:
    """At most ``limit`` plans that cover all pairs of model, grid, stage count, zero and remat."""
    candidates = [
        replace(case, zero=zero, remat=remat)
        for case in full_matrix("float64")
        for zero in (0, 1, 2, 3)
        for remat in (False, True)
        if zero == 0 or any(dp > 1 for _, dp, _ in case.stages)
    ]

    def pairs(case: Case) -> set[tuple[str, str]]:
        kinds = "uniform" if len(set(case.stages)) == 1 else "unlike"
        tensor = "tp" if any(tp > 1 for _, _, tp in case.stages) else "no tp"
        facts = [case.model, case.grid, f"s{len(case.stages)}", f"zero{case.zero}", f"remat{case.remat}", kinds, tensor]
        return {(a, b) for i, a in enumerate(facts) for b in facts[i + 1 :]}

    missing = set().union(*(pairs(case) for case in candidates))
    chosen: list[Case] = []
    while missing and len(chosen) < limit:
        best = max(candidates, key=lambda case: (len(pairs(case) & missing), case.key))
        if not pairs(best) & missing:
            break
        chosen.append(best)
        missing -= pairs(best)
    return chosen
