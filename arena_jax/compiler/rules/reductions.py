"""Reductions over whole dims and over windows, cumulative sums, sorting and choosing."""

from typing import Any

from arena_jax.compiler.rules.rule import Dim, Factors, Rule, factors_of, rule_for, same_shape, shape_of, whole

REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "min",
    "reduce_or": "max",
    "reduce_prod": "prod",
    "argmax": "",
    "argmin": "",
    "reduce_xor": "",
}
"""Primitive -> how partial results combine; nothing where they do not."""
CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})


@rule_for(*REDUCTIONS)
def reduction(eqn: Any) -> Rule:
    """Kept dims move along; reduced ones leave partial results."""
    factors = Factors()
    dims = factors.array(shape_of(eqn.invars[0]))
    axes = set(eqn.params["axes"])
    gone = factors_of([dims[axis] for axis in axes])
    kind = REDUCTIONS[eqn.primitive.name]
    kept = tuple(d for i, d in enumerate(dims) if i not in axes)
    return Rule(
        [tuple(dims)] * len(eqn.invars),
        [kept] * len(eqn.outvars),
        factors.sizes,
        reduced=dict.fromkeys(gone, kind) if kind else {},
        fixed=set() if kind else gone,
    )


@rule_for("reduce")
def reduction_by_function(eqn: Any) -> Rule:
    """Half of the operands are arrays, half initial values; what is reduced by a function stays whole."""
    factors = Factors()
    arrays = len(eqn.invars) // 2
    dims = factors.array(shape_of(eqn.invars[0]))
    gone = set(eqn.params["dimensions"])
    kept = tuple(d for i, d in enumerate(dims) if i not in gone)
    return Rule(
        [tuple(dims)] * arrays + [whole(shape_of(a)) for a in eqn.invars[arrays:]],
        [kept] * len(eqn.outvars),
        factors.sizes,
        fixed=factors_of([dims[axis] for axis in gone]),
    )


@rule_for(*CUMULATIVE)
def cumulative(eqn: Any) -> Rule:
    """What runs over a dim needs it whole."""
    return same_shape(eqn, {eqn.params["axis"]})


@rule_for("sort")
def sort(eqn: Any) -> Rule:
    """The sorted dim stays whole, for keys and values alike."""
    return same_shape(eqn, {eqn.params["dimension"]})


@rule_for("top_k", "approx_top_k")
def top_k(eqn: Any) -> Rule:
    """The dim chosen from stays whole."""
    factors = Factors()
    dims = factors.array(shape_of(eqn.invars[0]))
    axis = eqn.params.get("axis", eqn.params.get("reduction_dimension", -1)) % len(dims)
    out = list(dims)
    out[axis] = factors.new(shape_of(eqn.outvars[0])[axis])
    fixed = {*dims[axis], *out[axis]}
    return Rule([tuple(dims)], [tuple(out)] * len(eqn.outvars), factors.sizes, fixed=fixed)


@rule_for("reduce_window_max", "reduce_window_sum", "reduce_window_min", "reduce_window")
def reduce_window(eqn: Any) -> Rule:
    """Dims that the window leaves as they are; initial values, if any, are scalars."""
    factors = Factors()
    dims = factors.array(shape_of(eqn.invars[0]))
    out = _windowed(factors, dims, shape_of(eqn.outvars[0]), eqn.params)
    operands = [tuple(dims) if shape_of(a) else () for a in eqn.invars]
    return Rule(operands, [tuple(out)] * len(eqn.outvars), factors.sizes, fixed=_changed(dims, out))


@rule_for("select_and_gather_add")
def select_and_gather_add(eqn: Any) -> Rule:
    """Derivative of a maximum over windows: two arrays of one shape in, windows out."""
    factors = Factors()
    dims = factors.array(shape_of(eqn.invars[0]))
    out = _windowed(factors, dims, shape_of(eqn.outvars[0]), eqn.params)
    return Rule([tuple(dims)] * 2, [tuple(out)], factors.sizes, fixed=_changed(dims, out))


@rule_for("select_and_scatter_add", "select_and_scatter")
def select_and_scatter(eqn: Any) -> Rule:
    """Transpose of it: windows and the array they were taken from in, the array's shape out."""
    factors = Factors()
    dims = factors.array(shape_of(eqn.invars[1]))
    source = _windowed(factors, dims, shape_of(eqn.invars[0]), eqn.params)
    rest = [whole(shape_of(a)) for a in eqn.invars[2:]]
    operands = [tuple(source), tuple(dims), *rest]
    return Rule(operands, [tuple(dims)], factors.sizes, fixed=_changed(dims, source))


def _windowed(factors: Factors, dims: list[Dim], shape: tuple[int, ...], params: Any) -> list[Dim]:
    """Dims of the windows' array: those of the array where a window is one element at its own place."""
    ones = (1,) * len(dims)
    settings = zip(
        params["window_dimensions"],
        params["window_strides"],
        params.get("base_dilation", ones),
        params["padding"],
        strict=True,
    )
    same = [(w, s, d, tuple(p)) == (1, 1, 1, (0, 0)) for w, s, d, p in settings]
    return [d if keep else factors.new(n) for d, keep, n in zip(dims, same, shape, strict=True)]


def _changed(dims: list[Dim], out: list[Dim]) -> set[int]:
    return {f for d, o in zip(dims, out, strict=True) if d != o for f in (*d, *o)}
