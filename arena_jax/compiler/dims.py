"""How the dims of an equation's operands and results correspond, per primitive.

A :class:`Rule` writes an equation like an einsum: every dim is a list of *factors*, major first, and
equal factors of operands and results move together. Sharding a factor over a mesh axis shards all
dims it leads; a *reduced* factor leaves partial results behind; a *fixed* one cannot be sharded
without gathering. The form follows XLA Shardy's sharding rules.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

Dim = tuple[int, ...]
Dims = tuple[Dim, ...]

ELEMENTWISE = frozenset(
    [
        "abs",
        "acos",
        "acosh",
        "add",
        "add_any",
        "and",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bessel_i0e",
        "bessel_i1e",
        "bitcast_convert_type",
        "cbrt",
        "ceil",
        "clamp",
        "clz",
        "conj",
        "convert_element_type",
        "copy",
        "copy_p",
        "cos",
        "cosh",
        "digamma",
        "div",
        "eq",
        "erf",
        "erf_inv",
        "erfc",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "ge",
        "gt",
        "imag",
        "integer_pow",
        "is_finite",
        "le",
        "lgamma",
        "log",
        "log1p",
        "logistic",
        "lt",
        "max",
        "min",
        "mul",
        "name",
        "ne",
        "neg",
        "nextafter",
        "not",
        "one_minus_square",
        "or",
        "polynomial",
        "population_count",
        "pow",
        "pvary",
        "random_wrap",
        "real",
        "reduce_precision",
        "regularized_incomplete_beta",
        "rem",
        "round",
        "rsqrt",
        "select_n",
        "shift_left",
        "shift_right_arithmetic",
        "shift_right_logical",
        "sharding_constraint",
        "sign",
        "sin",
        "sinh",
        "sqrt",
        "square",
        "stop_gradient",
        "sub",
        "tan",
        "tanh",
        "xor",
        "reshard",
    ]
)
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
CUMULATIVE = frozenset({"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"})


@dataclass
class Rule:
    """Correspondence of dims; factor numbers are local to the rule.

    Attributes:
        operands, results: per array, per dim, the factors it is made of.
        sizes: size of each factor.
        reduced: factor -> how partial results combine (``sum``, ``max``, ...).
        fixed: factors that cannot be sharded.
    """

    operands: list[Dims]
    results: list[Dims]
    sizes: dict[int, int]
    reduced: dict[int, str] = field(default_factory=dict)
    fixed: set[int] = field(default_factory=set)


class _Factors:
    """Hands out factor numbers with their sizes."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        self._next = count()

    def new(self, size: int) -> Dim:
        """A dim of one new factor; dims of size 1 have none."""
        if size == 1:
            return ()
        factor = next(self._next)
        self.sizes[factor] = size
        return (factor,)

    def array(self, shape: tuple[int, ...]) -> list[Dim]:
        return [self.new(size) for size in shape]


_RULES: dict[str, Callable[[Any], Rule]] = {}


def rule_of(eqn: Any) -> Rule | None:
    """The rule of an equation, or ``None`` when its primitive is unknown or a call."""
    name = eqn.primitive.name
    if name in ELEMENTWISE:
        return _elementwise(eqn)
    if name in REDUCTIONS:
        return _reduction(eqn)
    if name in CUMULATIVE:
        return _fixed_axes(eqn, {eqn.params["axis"]})
    if name in _RULES:
        return _RULES[name](eqn)
    return None


def _register(*names: str) -> Callable[[Callable[[Any], Rule]], Callable[[Any], Rule]]:
    def register(make: Callable[[Any], Rule]) -> Callable[[Any], Rule]:
        for name in names:
            _RULES[name] = make
        return make

    return register


def _shape(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def _elementwise(eqn: Any) -> Rule:
    out = _shape(eqn.outvars[0])
    factors = _Factors()
    dims = factors.array(out)
    operands: list[Dims] = []
    for atom in eqn.invars:
        shape = _shape(atom)
        if len(shape) != len(out):
            operands.append(tuple(() for _ in shape))
        else:
            operands.append(tuple(d if n == m else () for d, n, m in zip(dims, shape, out, strict=True)))
    return Rule(operands, [tuple(dims)] * len(eqn.outvars), factors.sizes)


def _reduction(eqn: Any) -> Rule:
    factors = _Factors()
    dims = factors.array(_shape(eqn.invars[0]))
    axes = set(eqn.params["axes"])
    gone = [f for axis in axes for f in dims[axis]]
    kind = REDUCTIONS[eqn.primitive.name]
    kept = tuple(d for i, d in enumerate(dims) if i not in axes)
    return Rule(
        [tuple(dims)] * len(eqn.invars),
        [kept] * len(eqn.outvars),
        factors.sizes,
        reduced=dict.fromkeys(gone, kind) if kind else {},
        fixed=set() if kind else set(gone),
    )


def _fixed_axes(eqn: Any, axes: set[int]) -> Rule:
    """Operands and results of one shape, some of whose dims cannot be sharded."""
    factors = _Factors()
    dims = factors.array(_shape(eqn.invars[0]))
    shape = _shape(eqn.invars[0])
    operands = [tuple(dims) if _shape(a) == shape else tuple(() for _ in _shape(a)) for a in eqn.invars]
    return Rule(
        operands,
        [tuple(dims)] * len(eqn.outvars),
        factors.sizes,
        fixed={f for axis in axes for f in dims[axis]},
    )


@_register("dot_general")
def _dot_general(eqn: Any) -> Rule:
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    factors = _Factors()
    lhs, rhs = factors.array(_shape(eqn.invars[0])), factors.array(_shape(eqn.invars[1]))
    for i, j in (*zip(lhs_batch, rhs_batch, strict=True), *zip(lhs_contract, rhs_contract, strict=True)):
        rhs[j] = lhs[i]
    free_lhs = [d for i, d in enumerate(lhs) if i not in (*lhs_contract, *lhs_batch)]
    free_rhs = [d for j, d in enumerate(rhs) if j not in (*rhs_contract, *rhs_batch)]
    out = tuple([lhs[i] for i in lhs_batch] + free_lhs + free_rhs)
    reduced = {f: "sum" for i in lhs_contract for f in lhs[i]}
    return Rule([tuple(lhs), tuple(rhs)], [out], factors.sizes, reduced=reduced)


@_register("conv_general_dilated")
def _conv(eqn: Any) -> Rule:
    numbers = eqn.params["dimension_numbers"]
    factors = _Factors()
    lhs, rhs = factors.array(_shape(eqn.invars[0])), factors.array(_shape(eqn.invars[1]))
    out_shape = _shape(eqn.outvars[0])
    out: list[Dim] = [()] * len(out_shape)
    grouped = eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1
    fixed = {f for i in numbers.lhs_spec[2:] for f in lhs[i]} | {f for i in numbers.rhs_spec[2:] for f in rhs[i]}
    if eqn.params["batch_group_count"] == 1:
        out[numbers.out_spec[0]] = lhs[numbers.lhs_spec[0]]
    else:  # groups of the batch become features
        out[numbers.out_spec[0]] = factors.new(out_shape[numbers.out_spec[0]])
        fixed |= {*lhs[numbers.lhs_spec[0]], *out[numbers.out_spec[0]]}
    for i in numbers.out_spec[2:]:
        out[i] = factors.new(out_shape[i])
        fixed |= set(out[i])
    reduced: dict[int, str] = {}
    if grouped:
        out[numbers.out_spec[1]] = factors.new(out_shape[numbers.out_spec[1]])
        for dim in (
            lhs[numbers.lhs_spec[1]],
            rhs[numbers.rhs_spec[0]],
            rhs[numbers.rhs_spec[1]],
            out[numbers.out_spec[1]],
        ):
            fixed |= set(dim)
    else:
        rhs[numbers.rhs_spec[1]] = lhs[numbers.lhs_spec[1]]
        out[numbers.out_spec[1]] = rhs[numbers.rhs_spec[0]]
        reduced = dict.fromkeys(lhs[numbers.lhs_spec[1]], "sum")
    return Rule([tuple(lhs), tuple(rhs)], [tuple(out)], factors.sizes, reduced=reduced, fixed=fixed)


@_register("broadcast_in_dim")
def _broadcast(eqn: Any) -> Rule:
    factors = _Factors()
    out_shape = _shape(eqn.outvars[0])
    out = factors.array(out_shape)
    operands: list[Dims] = [()] * len(eqn.invars)
    if eqn.invars:
        shape, where = _shape(eqn.invars[0]), eqn.params["broadcast_dimensions"]
        operands[0] = tuple(out[j] if shape[i] == out_shape[j] else () for i, j in enumerate(where))
    return Rule(operands, [tuple(out)], factors.sizes)


@_register("reshape")
def _reshape(eqn: Any) -> Rule:
    """Match runs of dims with equal products; a dim of several factors is led by its major one."""
    source, target = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    if 0 in source:
        return _all_fixed(eqn)
    factors = _Factors()
    lhs: list[Dim] = [()] * len(source)
    rhs: list[Dim] = [()] * len(target)
    fixed: set[int] = set()
    i = j = 0
    left, right = (source[0] if source else 1), (target[0] if target else 1)
    while i < len(source) and j < len(target):
        if left == 1:
            i += 1
            left = source[i] if i < len(source) else 1
            continue
        if right == 1:
            j += 1
            right = target[j] if j < len(target) else 1
            continue
        small, large = min(left, right), max(left, right)
        if large % small:
            # Parts that overlap without dividing, as 6 -> 4: what follows cannot be tracked.
            rest = [factors.new(left), *map(factors.new, source[i + 1 :])]
            other = [factors.new(right), *map(factors.new, target[j + 1 :])]
            lhs[i:] = [(*lhs[i], *rest[0]), *rest[1:]]
            rhs[j:] = [(*rhs[j], *other[0]), *other[1:]]
            fixed = {f for dim in (*rest, *other) for f in dim}
            break
        factor = factors.new(small)
        # The major part comes first because runs are consumed from the left.
        lhs[i], rhs[j] = (*lhs[i], *factor), (*rhs[j], *factor)
        left, right = left // small, right // small
    return Rule([tuple(lhs)], [tuple(rhs)], factors.sizes, fixed=fixed)


@_register("transpose")
def _transpose(eqn: Any) -> Rule:
    factors = _Factors()
    dims = factors.array(_shape(eqn.invars[0]))
    return Rule([tuple(dims)], [tuple(dims[i] for i in eqn.params["permutation"])], factors.sizes)


@_register("squeeze")
def _squeeze(eqn: Any) -> Rule:
    factors = _Factors()
    dims = factors.array(_shape(eqn.invars[0]))
    gone = {d % len(dims) for d in eqn.params["dimensions"]}
    return Rule([tuple(dims)], [tuple(d for i, d in enumerate(dims) if i not in gone)], factors.sizes)


@_register("expand_dims")
def _expand_dims(eqn: Any) -> Rule:
    factors = _Factors()
    dims = factors.array(_shape(eqn.invars[0]))
    kept = iter(dims)
    new = set(eqn.params["dimensions"])
    out = tuple(() if i in new else next(kept) for i in range(len(_shape(eqn.outvars[0]))))
    return Rule([tuple(dims)], [out], factors.sizes)


@_register(
    "slice", "dynamic_slice", "pad", "concatenate", "split", "dynamic_update_slice", "rev", "tile", "stack", "unstack"
)
def _same_where_equal(eqn: Any) -> Rule:
    """Dims whose size does not change correspond; the others cannot be sharded."""
    name = eqn.primitive.name
    factors = _Factors()
    shape = _shape(eqn.outvars[0]) if eqn.outvars else ()
    arrays = [_shape(a) for a in eqn.invars]
    rank = len(shape)
    if any(len(s) != rank for s in arrays if s) or (name == "concatenate" and not rank):
        return _all_fixed(eqn)
    dims = [factors.new(n) for n in shape]
    fixed: set[int] = set()
    changed: set[int] = set()
    if name == "concatenate":
        changed = {eqn.params["dimension"]}
    elif name == "split":
        changed = {eqn.params["axis"]}
    elif name == "rev":
        changed = set(eqn.params["dimensions"])
    elif name == "pad":  # a dim may be shifted and keep its size
        changed = {i for i, config in enumerate(eqn.params["padding_config"]) if tuple(config) != (0, 0, 0)}
    for s in arrays:
        changed |= {i for i, n in enumerate(s) if n != shape[i]}

    def own(s: tuple[int, ...]) -> Dims:
        out = tuple(factors.new(n) if i in changed else dims[i] for i, n in enumerate(s))
        fixed.update(f for i in changed if i < len(out) for f in out[i])
        return out

    operands = [own(s) if s else () for s in arrays]
    results = [own(_shape(v)) for v in eqn.outvars]
    return Rule(operands, results, factors.sizes, fixed=fixed)


@_register("sort")
def _sort(eqn: Any) -> Rule:
    return _fixed_axes(eqn, {eqn.params["dimension"]})


@_register("top_k")
def _top_k(eqn: Any) -> Rule:
    factors = _Factors()
    dims = factors.array(_shape(eqn.invars[0]))
    out = (*dims[:-1], factors.new(_shape(eqn.outvars[0])[-1]))
    fixed = {*dims[-1], *out[-1]}
    return Rule([tuple(dims)], [tuple(out)] * len(eqn.outvars), factors.sizes, fixed=fixed)


@_register(
    "iota",
    "random_bits",
    "random_fold_in",
    "random_split",
    "random_unwrap",
    "random_seed",
    "random_clone",
    "empty",
    "rng_uniform",
)
def _source(eqn: Any) -> Rule:
    """Results that depend on no sharded operand: any dim may be sharded at no cost."""
    factors = _Factors()
    results = [tuple(factors.array(_shape(v))) for v in eqn.outvars]
    return Rule([tuple(() for _ in _shape(a)) for a in eqn.invars], results, factors.sizes)


@_register("gather")
def _gather(eqn: Any) -> Rule:
    """Index batch dims, whole-slice dims and (as a masked sum) indexed dims of the operand."""
    numbers, slices = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand_shape, index_shape = _shape(eqn.invars[0]), _shape(eqn.invars[1])
    out_shape = _shape(eqn.outvars[0])
    factors = _Factors()
    index = [*factors.array(index_shape[:-1]), ()]
    operand_batch = tuple(getattr(numbers, "operand_batching_dims", ()))
    index_batch = tuple(getattr(numbers, "start_indices_batching_dims", ()))
    operand: list[Dim] = [()] * len(operand_shape)
    reduced: dict[int, str] = {}
    fixed: set[int] = set()
    window = [i for i in range(len(operand_shape)) if i not in (*numbers.collapsed_slice_dims, *operand_batch)]
    out: list[Dim] = [()] * len(out_shape)
    for i, j in zip(operand_batch, index_batch, strict=True):
        operand[i] = index[j]
    for i, j in zip(window, numbers.offset_dims, strict=True):
        operand[i] = factors.new(operand_shape[i])
        if slices[i] == operand_shape[i]:
            out[j] = operand[i]
        else:
            out[j] = factors.new(out_shape[j])
            fixed |= {*operand[i], *out[j]}
    for i in numbers.collapsed_slice_dims:
        operand[i] = factors.new(operand_shape[i])
        reduced |= dict.fromkeys(operand[i], "sum")
    batch_dims = iter(index[:-1])
    for j in range(len(out_shape)):
        if j not in numbers.offset_dims:
            out[j] = next(batch_dims)
    return Rule([tuple(operand), tuple(index)], [tuple(out)], factors.sizes, reduced=reduced, fixed=fixed)


@_register("reduce_window_max", "reduce_window_sum", "reduce_window_min", "reduce_window")
def _reduce_window(eqn: Any) -> Rule:
    """Dims that the window leaves as they are; initial values, if any, are scalars."""
    factors = _Factors()
    shape, out_shape = _shape(eqn.invars[0]), _shape(eqn.outvars[0])
    settings = zip(
        eqn.params["window_dimensions"],
        eqn.params["window_strides"],
        eqn.params["base_dilation"],
        eqn.params["padding"],
        strict=True,
    )
    whole = [(w, s, d, tuple(p)) == (1, 1, 1, (0, 0)) for w, s, d, p in settings]
    dims = factors.array(shape)
    out = [d if same else factors.new(n) for d, same, n in zip(dims, whole, out_shape, strict=True)]
    fixed = {f for d, o, same in zip(dims, out, whole, strict=True) if not same for f in (*d, *o)}
    operands = [tuple(dims) if _shape(a) else () for a in eqn.invars]
    return Rule(operands, [tuple(out)] * len(eqn.outvars), factors.sizes, fixed=fixed)


@_register("optimization_barrier")
def _barrier(eqn: Any) -> Rule:
    factors = _Factors()
    dims = [tuple(factors.array(_shape(a))) for a in eqn.invars]
    return Rule(dims, list(dims), factors.sizes)


def _all_fixed(eqn: Any) -> Rule:
    factors = _Factors()
    operands = [tuple(factors.array(_shape(a))) for a in eqn.invars]
    results = [tuple(factors.array(_shape(v))) for v in eqn.outvars]
    return Rule(operands, results, factors.sizes, fixed=set(factors.sizes))
