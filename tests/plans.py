"""Random plans and rows of an index, for tests of what stores and reads them."""

from hypothesis import strategies as st

from arena_jax.grid import (
    AXES,
    Allocation,
    Estimate,
    GridShape,
    IndexRow,
    Plan,
    Precision,
    StageEstimate,
    StagePlan,
    grids_of,
    logical_meshes,
    tilings,
)

NAMES = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=12)
DTYPES = st.sampled_from([None, "float32", "bfloat16", "float64"])


@st.composite
def specs(draw: st.DrawFn):
    """A partition spec that names no axis twice."""
    dims: list[str | tuple[str, ...] | None] = [None] * draw(st.integers(0, 3))
    for axis in draw(st.permutations(AXES)):
        if dims and draw(st.booleans()):
            at = draw(st.integers(0, len(dims) - 1))
            held = dims[at]
            dims[at] = axis if held is None else (held, axis) if isinstance(held, str) else held
    return tuple(dims)


@st.composite
def plans(draw: st.DrawFn, allocation: Allocation | None = None) -> Plan:
    """Any plan that does not contradict itself, on up to 16 devices."""
    if allocation is None:
        allocation = Allocation(
            draw(st.sampled_from(["cpu", "a100-40", "gone-from-the-catalogue"])),
            draw(st.integers(1, 2)),
            draw(st.integers(1, 8)),
        )
    grid = draw(st.sampled_from(grids_of(allocation, 4)))
    submeshes = draw(st.permutations(draw(st.sampled_from(tilings(grid)))))
    num_microbatches = draw(st.integers(1, 8))
    stages, layer = [], 0
    for submesh in submeshes:
        dp, tp = draw(st.sampled_from(list(logical_meshes(submesh.num_devices))))
        last = layer + draw(st.integers(0, 3))
        stages.append(
            StagePlan(
                layers=(layer, last),
                submesh=submesh,
                dp=dp,
                tp=tp,
                zero=draw(st.integers(0, 3)),
                remat=draw(st.booleans()),
                parameters=draw(st.dictionaries(NAMES, specs(), max_size=3)),
                activations=draw(st.dictionaries(NAMES, specs(), max_size=3)),
            )
        )
        layer = last + 1
    return Plan(
        model_fingerprint=draw(NAMES),
        global_batch=num_microbatches * draw(st.integers(1, 16)),
        grid=grid,
        num_microbatches=num_microbatches,
        stages=tuple(stages),
        precision=Precision(parameter=draw(DTYPES), compute=draw(DTYPES)),
    )


SECONDS = st.floats(1e-6, 1e6)
BYTES = st.integers(0, 2**45)


@st.composite
def rows(draw: st.DrawFn, allocation: Allocation | None = None) -> IndexRow:
    """A row with a plan and its estimate, or with a reason why there is none."""
    plan = draw(plans(allocation))
    if draw(st.booleans()):
        return IndexRow(
            grid=plan.grid,
            num_microbatches=plan.num_microbatches,
            plan=None,
            estimate=None,
            reason=draw(NAMES),
            least_memory_bytes=draw(st.none() | BYTES),
        )
    stages = tuple(
        StageEstimate(compute_s=draw(SECONDS), communication_s=draw(SECONDS), memory_bytes=draw(BYTES))
        for _ in plan.stages
    )
    return IndexRow(
        grid=plan.grid,
        num_microbatches=plan.num_microbatches,
        plan=plan,
        estimate=Estimate(
            step_time_s=draw(SECONDS),
            memory_bytes=draw(BYTES),
            device_memory_bytes=draw(BYTES),
            stages=stages,
            flops=draw(SECONDS),
            breakdown=draw(st.dictionaries(NAMES, SECONDS, max_size=2)),
        ),
        measured_step_time_s=draw(st.none() | SECONDS),
        profiles=tuple(draw(st.lists(NAMES, max_size=2))),
    )


def row(grid: str, seconds: float | None, *, num_microbatches: int = 1, measured: float | None = None) -> IndexRow:
    """A row with one even-cut, purely data-parallel plan that takes ``seconds``, or with no plan."""
    shape = GridShape.parse(grid)
    if seconds is None:
        return IndexRow(grid=shape, num_microbatches=num_microbatches, plan=None, estimate=None, reason="too large")
    stages = tuple(
        StagePlan(layers=(i, i), submesh=submesh, dp=submesh.num_devices, tp=1)
        for i, submesh in enumerate(tilings(shape)[0])
    )
    plan = Plan(model_fingerprint="toy", global_batch=60, grid=shape, num_microbatches=num_microbatches, stages=stages)
    estimate = Estimate(step_time_s=seconds, memory_bytes=1, device_memory_bytes=2, stages=(), flops=1.0)
    return IndexRow(
        grid=shape, num_microbatches=num_microbatches, plan=plan, estimate=estimate, measured_step_time_s=measured
    )
