"""The parts of an estimate: they add up, and change as each option says."""

import itertools

import optax
import pytest

from arena_jax.compiler import Constraints, Problem, make_problem, plan_problem
from arena_jax.compiler.analysis import Analysis, analyse
from arena_jax.grid import Estimate, GridShape, Precision
from tests.doubles import Toy, ToyLoader, toy_loss
from tests.problems import recipe_analysis

WIDTH = 64


@pytest.fixture(scope="module")
def problem() -> Problem:
    return make_problem(lambda rngs: Toy(rngs, hidden=WIDTH), optax.adam(1e-2), toy_loss, next(ToyLoader()))


@pytest.fixture(scope="module")
def analysis(problem: Problem) -> Analysis:
    return analyse(problem)


def estimate(analysis: Analysis, *, grid: str = "a100:2", zero: int = 0, remat: str = "off", m: int = 2) -> Estimate:
    pins = Constraints(zero=zero, remat=remat, tp=1)
    index = plan_problem(
        analysis.problem, [GridShape.parse(grid)], constraints=pins, num_microbatches=m, analysis=analysis
    )
    (row,) = index
    assert row.estimate is not None, row.reason
    return row.estimate


@pytest.mark.parametrize(("zero", "remat"), [*itertools.product(range(4), ("on", "off"))])
def test_parts_add_up(analysis: Analysis, zero: int, remat: str) -> None:
    whole = estimate(analysis, zero=zero, remat=remat)
    assert sum(whole.breakdown.values()) == pytest.approx(whole.step_time_s)
    for stage in whole.stages:
        assert sum(stage.memory.values()) == stage.memory_bytes
        assert sum(stage.communication.values()) == pytest.approx(stage.communication_s)
        assert 0 < stage.forward_s < stage.time_s
        assert min([*stage.memory.values(), *stage.communication.values()]) >= 0


def test_what_a_device_holds_by_hand(problem: Problem, analysis: Analysis) -> None:
    """Adam in float32: two moments and a step counter; the gradient sum and one microbatch's gradient."""
    held = sum(leaf.num_bytes for leaf in problem.of_kind("params"))
    halved: dict[int, set[str]] = {0: set(), 1: {"optimizer"}, 2: {"optimizer", "gradients"}}
    halved[3] = {"optimizer", "gradients", "parameters"}
    for zero, names in halved.items():
        (stage,) = estimate(analysis, zero=zero).stages
        for name, whole in {"parameters": held, "gradients": 2 * held, "optimizer": 2 * held}.items():
            assert stage.memory[name] == pytest.approx(whole / (2 if name in names else 1), rel=2e-3, abs=8)


def test_half_precision_adds_copies_and_halves_what_a_microbatch_gives() -> None:
    half = Precision(parameter="float32", compute="bfloat16", accumulation="float32")
    problem = make_problem(
        lambda rngs: Toy(rngs, hidden=WIDTH), optax.adam(1e-2), toy_loss, next(ToyLoader()), precision=half
    )
    held = sum(leaf.num_bytes for leaf in problem.of_kind("params"))
    for zero, parts in {0: (1, 1), 1: (1, 1), 2: (1, 2), 3: (2, 2)}.items():
        (stage,) = estimate(analyse(problem), zero=zero).stages
        for name, by in zip(("parameters", "gradients"), parts, strict=True):
            assert stage.memory[name] == pytest.approx(1.5 * held / by, rel=2e-3, abs=8)


def test_a_tied_embedding_is_held_summed_and_reduced_in_both_stages() -> None:
    analysis = recipe_analysis("gpt")
    sizes = {leaf.name: leaf.num_bytes for leaf in analysis.problem.of_kind("params")}
    held, embedding = sum(sizes.values()), sizes["embedding"]
    stages = estimate(analysis, grid="a100:4/s2", m=2).stages
    together = {name: sum(stage.memory[name] for stage in stages) for name in stages[0].memory}
    assert together["parameters"] == pytest.approx(held + embedding, rel=1e-3)
    assert together["gradients"] == pytest.approx(2 * (held + embedding), rel=1e-3)
    assert together["optimizer"] == pytest.approx(2 * held, rel=1e-3)
    assert sum(s.collective_bytes["all_reduce"] for s in stages) == pytest.approx(held + embedding, rel=1e-3)


def test_what_a_step_sends_by_hand(problem: Problem, analysis: Analysis) -> None:
    """Whole gradients are reduced once, shards of them scattered; ZeRO-3 gathers parameters for each pass."""
    held = sum(leaf.num_bytes for leaf in problem.of_kind("params"))
    m = 2
    expected = {
        0: {"all_reduce": held},
        1: {"reduce_scatter": held, "all_gather": held},
        2: {"reduce_scatter": m * held, "all_gather": held},
        3: {"reduce_scatter": m * held, "all_gather": 2 * m * held},
    }
    for zero, kinds in expected.items():
        (stage,) = estimate(analysis, zero=zero, m=m).stages
        sent = {kind: num_bytes for kind, num_bytes in stage.collective_bytes.items() if num_bytes > 0.01 * held}
        assert sent == pytest.approx(kinds, rel=0.02), zero


def test_recomputing_costs_one_more_forward_pass(analysis: Analysis) -> None:
    (off,), (on,) = (estimate(analysis, remat=remat).stages for remat in ("off", "on"))
    assert on.forward_s == pytest.approx(off.forward_s)
    assert on.time_s == pytest.approx(off.time_s + off.forward_s)


def test_only_zero_3_gathers_parameters(analysis: Analysis) -> None:
    for zero in range(4):
        (stage,) = estimate(analysis, zero=zero).stages
        assert (stage.communication["parameters"] > 0) == (zero == 3)


def test_zero_3_gathers_in_the_dtype_of_computing_for_every_pass() -> None:
    """As XLA builds it for CUDA and TPU: twice a microbatch, three times where the forward pass runs again."""
    analysis = recipe_analysis("gpt", "precision.compute=bfloat16")
    for remat, passes in (("off", 2), ("on", 3)):
        (stage,) = estimate(analysis, zero=3, remat=remat).stages
        (once,) = estimate(analysis, zero=1, remat=remat).stages
        gathered = stage.collective_bytes["all_gather"]
        assert gathered == pytest.approx(passes * 2 * once.collective_bytes["all_gather"] / 2, rel=0.02)


def test_only_later_stages_receive(analysis: Analysis) -> None:
    first, *rest = estimate(analysis, grid="a100:2/s2", m=4).stages
    assert first.transfer_s == 0
    assert all(stage.transfer_s > 0 for stage in rest)


def test_a_stage_in_the_same_node_receives_over_its_links() -> None:
    """Of four stages on two nodes of two only the third lies in another node than the stage before."""
    _, second, third, fourth = estimate(recipe_analysis("gpt"), grid="a100:2x2/s4", m=4).stages
    assert max(second.transfer_s, fourth.transfer_s) < third.transfer_s
