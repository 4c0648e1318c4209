"""Equations that treat every element alike, and those that make arrays out of nothing."""

from typing import Any

from arena_jax.compiler.rules.rule import Dims, Factors, Rule, rule_for, shape_of, whole

ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy cos cosh
    digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor from_edtype ge
    gt igamma igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to lgamma
    log log1p logistic lt lt_to max mesh_cast min mul mulhi name ne neg nextafter not
    one_minus_square or pcast polygamma polynomial population_count pow pvary random_gamma
    random_gamma_grad random_wrap real reciprocal reduce_precision regularized_incomplete_beta rem
    reshard round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 to_edtype
    xor zeta
    """.split()  # noqa: SIM905
)
# Results depend on keys, counters or nothing; what a device needs of them it can make itself.
SOURCES = frozenset(
    """
    axis_index empty empty2 iota random_bits random_clone random_fold_in random_seed random_split random_unwrap
    rng_bit_generator rng_uniform
    """.split()  # noqa: SIM905
)


@rule_for(*ELEMENTWISE)
def elementwise(eqn: Any) -> Rule:
    """Operands of the result's shape follow it; sizes of 1 and scalars are broadcast."""
    out = shape_of(eqn.outvars[0])
    factors = Factors()
    dims = factors.array(out)
    operands: list[Dims] = []
    for atom in eqn.invars:
        shape = shape_of(atom)
        if len(shape) != len(out):
            operands.append(whole(shape))
        else:
            operands.append(tuple(d if n == m else () for d, n, m in zip(dims, shape, out, strict=True)))
    return Rule(operands, [tuple(dims)] * len(eqn.outvars), factors.sizes)


@rule_for("optimization_barrier", "device_put", "copy_p", "tie", "freeze")
def pairwise(eqn: Any) -> Rule:
    """Each result is the operand at its place."""
    factors = Factors()
    dims = [tuple(factors.array(shape_of(a))) for a in eqn.invars]
    return Rule(dims, dims[: len(eqn.outvars)], factors.sizes)


@rule_for(*SOURCES)
def source(eqn: Any) -> Rule:
    """Results that depend on no sharded operand: any dim may be sharded at no cost."""
    factors = Factors()
    results = [tuple(factors.array(shape_of(v))) for v in eqn.outvars]
    return Rule([whole(shape_of(a)) for a in eqn.invars], results, factors.sizes)
