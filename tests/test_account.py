"""What a plan claims is what XLA builds: collectives of the compiled step against the search's account."""

from collections import Counter

import pytest

from arena_jax.compiler.hlo import collective_bytes
from arena_jax.compiler.intra_op import work as w
from arena_jax.runtime.one_stage import OneStage
from tests.problems import compile_program, make_plan, recipe_analysis


def account(model: str, dp: int, tp: int) -> tuple[Counter[str], Counter[str]]:
    """Bytes by kind of collective: as planned, and in the compiled step."""
    analysis = recipe_analysis(model)
    program = compile_program(analysis.problem, make_plan(analysis, f"cpu:{dp * tp}", [(dp, tp)]))
    (engine,) = (x for x in vars(program).values() if isinstance(x, OneStage))
    planned: Counter[str] = Counter()
    for c in w.collectives(analysis.shardings.find(dp, tp).works.sum(axis=0)):
        planned[c.kind] += round(c.num_bytes)
    return planned, collective_bytes(engine.compiled_text())


@pytest.mark.parametrize(("model", "dp", "tp"), [("gpt", 2, 2), ("wide_resnet", 2, 2), ("moe", 2, 1)])
def test_collectives_are_those_of_the_plan(model: str, dp: int, tp: int) -> None:
    planned, built = account(model, dp, tp)
    assert sum(planned.values()) == pytest.approx(sum(built.values()), rel=0.1)
    for kind, num_bytes in built.items():
        if num_bytes > 0.1 * sum(built.values()):
            assert planned[kind] == pytest.approx(num_bytes, rel=0.1)
