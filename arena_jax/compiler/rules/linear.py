"""Fourier transforms and linear algebra: batches of whole vectors or matrices."""

from typing import Any

from arena_jax.compiler.rules.rule import Factors, Rule, all_fixed, factors_of, rule_for, shape_of

# Dims at the end of the first operand that one problem takes; those before are a batch.
_PROBLEM_RANK = {
    "cholesky": 2,
    "cholesky_update": 2,
    "eig": 2,
    "eigh": 2,
    "hessenberg": 2,
    "householder_product": 2,
    "lu": 2,
    "lu_pivots_to_permutation": 1,
    "qr": 2,
    "geqrf": 2,
    "geqp3": 2,
    "schur": 2,
    "svd": 2,
    "symmetric_product": 2,
    "triangular_solve": 2,
    "tridiagonal": 2,
    "tridiagonal_solve": 1,
}


@rule_for("fft")
def fft(eqn: Any) -> Rule:
    """Transformed dims stay whole."""
    return _batched(eqn, len(eqn.params["fft_lengths"]))


@rule_for(*_PROBLEM_RANK)
def linear_algebra(eqn: Any) -> Rule:
    """Matrices stay whole, batches of them do not have to."""
    return _batched(eqn, _PROBLEM_RANK[eqn.primitive.name])


def _batched(eqn: Any, problem_rank: int) -> Rule:
    batch = shape_of(eqn.invars[0])[: len(shape_of(eqn.invars[0])) - problem_rank]
    arrays = [*eqn.invars, *eqn.outvars]
    if any(shape_of(a)[: len(batch)] != batch for a in arrays):
        return all_fixed(eqn)
    factors = Factors()
    shared = factors.array(batch)
    dims = [(*shared, *factors.array(shape_of(a)[len(batch) :])) for a in arrays]
    fixed = set(factors.sizes) - factors_of(shared)
    return Rule(dims[: len(eqn.invars)], dims[len(eqn.invars) :], factors.sizes, fixed=fixed)
