"""Plans in Alpa's terms and back."""

import ast
from dataclasses import replace

import pytest
from hypothesis import given, settings

from arena_jax.compiler.intra_op.specs import with_specs
from arena_jax.errors import PlanError
from arena_jax.grid import Allocation, GridShape, Plan, StagePlan, Submesh
from arena_jax.solver_setup import alpa_folder
from tests.plans import plans
from tests.problems import make_plan, recipe_analysis


def read_back(plan: Plan, terms=None) -> Plan:
    return Plan.from_alpa(
        plan.to_alpa() if terms is None else terms,
        allocation=plan.grid.allocation,
        model_fingerprint=plan.model_fingerprint,
        global_batch=plan.global_batch,
        precision=plan.precision,
    )


def as_alpa_knows_it(stage: StagePlan) -> StagePlan:
    """Without specs; ZeRO-1 is ZeRO-2 to Alpa, and either is nothing on one row of devices."""
    zero = stage.zero if stage.zero in (0, 3) else 2 if stage.dp > 1 else 0
    return replace(stage, zero=zero, parameters={}, activations={})


@settings(max_examples=25)
@given(plans())
def test_what_alpa_can_say_comes_back(plan: Plan) -> None:
    assert read_back(plan) == replace(plan, stages=tuple(map(as_alpa_knows_it, plan.stages)))


def two_stages() -> Plan:
    return Plan(
        model_fingerprint="f",
        global_batch=16,
        grid=GridShape(Allocation("a100-40", 2, 4), 2),
        num_microbatches=4,
        stages=(
            StagePlan(layers=(0, 2), submesh=Submesh(1, 4), dp=2, tp=2, zero=2),
            StagePlan(layers=(3, 5), submesh=Submesh(1, 4), dp=4, tp=1, zero=3, remat=True),
        ),
    )


def test_terms_by_hand() -> None:
    assert two_stages().to_alpa() == {
        "num_micro_batches": 4,
        "pipeline_schedule": "1f1b",
        "forward_stage_layer_ids": [[0, 1, 2], [3, 4, 5]],
        "submesh_physical_shapes": [[1, 4], [1, 4]],
        "submesh_logical_shapes": [[2, 2], [4, 1]],
        "submesh_autosharding_option_dicts": [
            {"force_batch_dim_to_mesh_dim": 0, "prefer_reduce_scatter": True, "force_zero_stage_3": False},
            {"force_batch_dim_to_mesh_dim": 0, "prefer_reduce_scatter": False, "force_zero_stage_3": True},
        ],
        "remat_layers": [False, True],
    }


def test_alpa_has_these_fields() -> None:
    """The names of the real dataclasses, read from the installed wheel's source."""
    folder = alpa_folder()
    if folder is None:
        pytest.skip("alpa is not installed (make setup)")
    terms = two_stages().to_alpa()
    stage_option = fields(folder / "alpa/pipeline_parallel/stage_construction.py", "ManualStageOption")
    assert stage_option <= set(terms)
    options = fields(folder / "alpa/shard_parallel/auto_sharding.py", "AutoShardingOption")
    assert all(set(each) <= options for each in terms["submesh_autosharding_option_dicts"])


def fields(path, name: str) -> set[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {line.target.id for line in node.body if isinstance(line, ast.AnnAssign)}
    raise AssertionError(f"no {name} in {path}")


def test_a_stage_option_of_alpas_own_is_read() -> None:
    """As its users write it: tuples, and option dicts left empty."""
    plan = two_stages()
    terms = {
        "forward_stage_layer_ids": [[0, 1, 2], [3, 4, 5]],
        "submesh_physical_shapes": [(1, 4), (1, 4)],
        "submesh_logical_shapes": [(2, 2), (4, 1)],
        "submesh_autosharding_option_dicts": [{}, {}],
    }
    found = read_back(plan, terms)
    assert [(s.layers, s.dp, s.tp, s.zero) for s in found.stages] == [((0, 2), 2, 2, 0), ((3, 5), 4, 1, 0)]
    assert found.num_microbatches == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"forward_stage_layer_id": []}, "did you mean 'forward_stage_layer_ids'"),
        ({"submesh_logical_shapes": [[2, 2]]}, "submesh_logical_shapes has 1 entries for 2 stages"),
        ({"forward_stage_layer_ids": [[0, 2], [3]]}, "no run of layers"),
        ({"submesh_physical_shapes": [[1, 4], [4]]}, r"submesh_physical_shapes\[1\] is \[4\]"),
        ({"submesh_physical_shapes": [[1, 4], [1, 2]]}, "do not tile"),
        ({"pipeline_schedule": "gpipe"}, "'gpipe' is not run here"),
    ],
)
def test_terms_that_make_no_plan(change, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_back(two_stages(), two_stages().to_alpa() | change)


def test_specs_are_found_for_a_plan_of_alpas() -> None:
    analysis = recipe_analysis("gpt")
    plan = make_plan(analysis, "cpu:4", [(1, 2), (2, 1)])
    assert with_specs(analysis, read_back(plan)) == plan
