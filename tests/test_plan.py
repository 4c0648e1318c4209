"""Plans as text: they read back, their id is what is executed, and nonsense is refused as a plan."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arena_jax.errors import PlanError
from arena_jax.grid import GridShape, Plan, Precision, StagePlan, Submesh
from tests.plans import plans


def example(**changes: Any) -> Plan:
    """Two unlike stages on six devices."""
    stages = (
        StagePlan(
            layers=(0, 2),
            submesh=Submesh(1, 4),
            dp=2,
            tp=2,
            zero=1,
            parameters={"mlp/up": (None, "tp"), "embedding": (("dp", "tp"), None)},
            activations={"3:0": ("dp", None, "tp")},
        ),
        StagePlan(layers=(3, 5), submesh=Submesh(1, 2), dp=1, tp=2, remat=True, parameters={"head": ("tp",)}),
    )
    values = {
        "model_fingerprint": "0123456789abcdef",
        "global_batch": 48,
        "grid": GridShape.parse("cpu:6/s2"),
        "num_microbatches": 4,
        "stages": stages,
    }
    return Plan(**(values | changes))


def with_stage(index: int, **changes: Any) -> Plan:
    plan = example()
    stages = list(plan.stages)
    stages[index] = replace(stages[index], **changes)
    return replace(plan, stages=tuple(stages))


@settings(max_examples=30)
@given(plans())
def test_json_reads_back(plan: Plan) -> None:
    again = Plan.from_json(json.loads(plan.dumps()))
    assert again == plan
    assert again.plan_id == plan.plan_id
    assert again.dumps() == plan.dumps()


@settings(max_examples=30)
@given(plans())
def test_device_numbers_cover_the_allocation(plan: Plan) -> None:
    numbers = [number for stage in plan.device_numbers for number in stage]
    assert sorted(numbers) == list(range(plan.grid.num_devices))


def test_the_id_does_not_change_between_releases() -> None:
    """Of this format: stores and run directories name plans by it."""
    assert example().plan_id == "fd0a0e190e8f3e6c"


def test_the_id_does_not_depend_on_the_order_in_which_specs_were_found() -> None:
    stage = example().stages[0]
    turned = with_stage(0, parameters=dict(reversed(stage.parameters.items())))
    assert turned.plan_id == example().plan_id
    assert turned.dumps() == example().dumps()


def _moved_cut() -> Plan:
    first, second = example().stages
    return example(stages=(replace(first, layers=(0, 1)), replace(second, layers=(2, 5))))


def _swapped() -> Plan:
    first, second = example().stages
    return example(stages=(replace(second, layers=(0, 2)), replace(first, layers=(3, 5))))


CHANGES = {
    "model": lambda: example(model_fingerprint="other"),
    "batch": lambda: example(global_batch=52),
    "device type": lambda: example(grid=GridShape.parse("a100:6/s2")),
    "microbatches": lambda: example(num_microbatches=2),
    "layers": _moved_cut,
    "order of submeshes": _swapped,
    "dp and tp": lambda: with_stage(0, dp=4, tp=1),
    "zero": lambda: with_stage(0, zero=2),
    "remat": lambda: with_stage(1, remat=False),
    "parameter spec": lambda: with_stage(0, parameters={"mlp/up": ("tp", None), "embedding": (("dp", "tp"), None)}),
    "order of axes": lambda: with_stage(0, parameters={"mlp/up": (None, "tp"), "embedding": (("tp", "dp"), None)}),
    "activation spec": lambda: with_stage(0, activations={"3:0": ("dp", None, None)}),
    **{
        f"{f.name} dtype": lambda name=f.name: example(precision=replace(Precision(), **{name: "float64"}))
        for f in fields(Precision)
    },
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_id_changes_with_what_is_executed(change: str) -> None:
    assert CHANGES[change]().plan_id != example().plan_id


def test_ids_of_all_changes_differ() -> None:
    assert len({change().plan_id for change in CHANGES.values()}) == len(CHANGES)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: example(stages=example().stages[:1]), "has 1 stages"),
        (lambda: example(schedule="gpipe"), "unknown schedule 'gpipe'"),
        (lambda: example(num_microbatches=5), "a batch of 48 does not split into 5"),
        (lambda: example(num_microbatches=0), "does not split into 0"),
        (lambda: example(grid=GridShape.parse("cpu:8/s2")), "do not tile cpu:8"),
        (lambda: with_stage(0, submesh=Submesh(1, 3), dp=3, tp=1), "do not tile"),
        (lambda: with_stage(1, layers=(2, 5)), "stage 1 holds layers 2 to 5, expected to start at 3"),
        (lambda: with_stage(1, layers=(4, 5)), "expected to start at 3"),
        (lambda: with_stage(1, layers=(3, 2)), "holds layers 3 to 2"),
        (lambda: with_stage(0, dp=4), "dp 4 x tp 2 is not submesh 1x4"),
        (lambda: with_stage(0, zero=4), "zero must be 0, 1, 2 or 3"),
        (lambda: with_stage(0, parameters={"w": ("tp", "tp")}), "'w' names an axis twice"),
        (lambda: with_stage(0, parameters={"w": (("tp", "dp"), "dp")}), "'w' names an axis twice"),
        (lambda: with_stage(0, activations={"1:0": ("model",)}), "unknown one"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(change: Any, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        change()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("grid", "submeshes", "fits"),
    [
        ("cpu:6/s2", ["1x4", "1x2"], True),
        ("cpu:6/s2", ["1x2", "1x4"], True),
        ("cpu:6/s3", ["1x2", "1x2", "1x2"], True),
        ("cpu:6/s2", ["1x3", "1x3"], False),
        ("cpu:6/s2", ["1x1", "1x5"], False),
        ("cpu:6/s1", ["1x6"], True),
        ("cpu:2x3/s1", ["2x3"], True),
        ("cpu:2x3/s3", ["1x2", "1x2", "1x2"], False),
        ("cpu:2x4/s2", ["2x2", "2x2"], False),
        ("cpu:2x4/s3", ["1x4", "1x2", "1x2"], True),
    ],
)
def test_stages_take_powers_of_two_inside_a_node_or_whole_nodes(grid: str, submeshes: list[str], fits: bool) -> None:
    stages = []
    for i, text in enumerate(submeshes):
        nodes, devices = map(int, text.split("x"))
        stages.append(StagePlan(layers=(i, i), submesh=Submesh(nodes, devices), dp=nodes * devices, tp=1))
    values = {"stages": tuple(stages), "grid": GridShape.parse(grid), "num_microbatches": 1}
    if fits:
        assert len(example(**values).device_numbers) == len(stages)
    else:
        with pytest.raises(PlanError, match="do not tile"):
            example(**values)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def _spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to every part of a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        found.extend(_spots(part, (*path, key)))
    return found


SPOTS = _spots(json.loads(example().dumps()))


@given(st.sampled_from(SPOTS), st.one_of(st.just("delete"), JSON))
def test_a_spoilt_plan_is_refused_or_still_a_plan(spot: tuple[Any, ...], junk: Any) -> None:
    data = json.loads(example().dumps())
    inner = data
    for key in spot[:-1]:
        inner = inner[key]
    if junk == "delete":
        del inner[spot[-1]]
    else:
        inner[spot[-1]] = junk
    try:
        plan = Plan.from_json(data)
    except PlanError:
        return
    assert Plan.from_json(json.loads(plan.dumps())) == plan
    assert plan.device_numbers


@pytest.mark.parametrize(
    ("spot", "junk"),
    [
        (("num_microbatches",), 4.0),
        (("num_microbatches",), "4"),
        (("global_batch",), True),
        (("model_fingerprint",), 7),
        (("precision", "compute"), 32),
        (("stages", 0, "remat"), "false"),
        (("stages", 0, "dp"), 2.5),
        (("stages", 0, "layers"), [0, 1, 2]),
        (("stages", 0, "submesh"), "4"),
        (("stages", 0, "parameters"), [["mlp/up", ["tp"]]]),
        (("stages", 0, "parameters", "embedding"), "tp"),
        (("grid",), "cpu:6/s7"),
    ],
)
def test_values_of_another_type_are_not_guessed_at(spot: tuple[Any, ...], junk: Any) -> None:
    data = json.loads(example().dumps())
    inner = data
    for key in spot[:-1]:
        inner = inner[key]
    inner[spot[-1]] = junk
    with pytest.raises(PlanError):
        Plan.from_json(data)


@given(JSON)
def test_anything_else_is_refused(junk: Any) -> None:
    with pytest.raises(PlanError):
        Plan.from_json(junk)


def test_another_format_version_says_what_to_do() -> None:
    with pytest.raises(PlanError, match=r"format version 2.*reads 1\n.*plan --save"):
        Plan.from_json(example().to_json() | {"format_version": 2})


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "cannot read plan"), (b"{", "is not JSON"), (b"[1]", "does not hold"), (b"\xff\xfe", "is not JSON")],
)
def test_files_that_are_no_plan(tmp_path: Path, content: bytes | None, says: str) -> None:
    path = tmp_path / "plan.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PlanError, match=says):
        Plan.load(path)


def test_a_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(example().dumps(), encoding="utf-8")
    assert Plan.load(path) == example()
