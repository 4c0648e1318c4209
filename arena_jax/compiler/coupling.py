"""Does the loss couple samples of a batch?

Where it does not, the number of microbatches changes nothing but rounding, and a plan may choose it.
The check follows the row dim through the trace: rows may be treated alike, and summed once on the
way to the loss, linearly; anything else (batch statistics, expert capacity, random numbers, a
normaliser that depends on the batch) couples.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from arena_jax.compiler import _compat
from arena_jax.compiler.dims import RuleBook
from arena_jax.compiler.trace import Trace

# What is known of a value, by increasing dependence.
_FREE, _ROWS, _SUMMED, _COUPLED = range(4)
_LINEAR = frozenset(
    {
        "add",
        "sub",
        "neg",
        "convert_element_type",
        "reshape",
        "squeeze",
        "broadcast_in_dim",
        "copy",
        "add_any",
        "stop_gradient",
    }
)
_SCALING = frozenset({"mul", "div"})
_RANDOM = frozenset({"random_bits", "random_fold_in", "random_split", "threefry2x32"})


class _Value:
    """Status of a value and, for rows, the dim they lie in."""

    __slots__ = ("dim", "status")

    def __init__(self, status: int, dim: int | None = None) -> None:
        self.status = status
        self.dim = dim


class _Rows(NamedTuple):
    """Rows of the batch, and how equations treat dims."""

    num: int
    rules: RuleBook


def couples_samples(trace: Trace) -> str:
    """Say what couples samples, as one phrase; an empty string when nothing does."""
    env: dict[Any, _Value] = {var: _Value(_FREE) for var in trace.jaxpr.invars}
    for var, has_rows in zip(trace.batch_vars, trace.batch_has_rows, strict=True):
        env[var] = _Value(_ROWS, 0) if has_rows else _Value(_FREE)
    reasons: dict[str, None] = {}
    _walk(trace.jaxpr, env, reasons, _Rows(trace.rows, trace.rules))
    for atom, what in zip(trace.loss_atoms, ("loss", "weight of the loss"), strict=True):
        if not isinstance(atom, _compat.Literal) and env[atom].status == _COUPLED:
            reasons.setdefault(f"the {what} combines samples beyond a sum")
    return next(iter(reasons), "")


def _walk(jaxpr: Any, env: dict[Any, _Value], reasons: dict[str, None], rows: _Rows) -> None:
    for eqn in jaxpr.eqns:
        inputs = [_Value(_FREE) if isinstance(a, _compat.Literal) else env[a] for a in eqn.invars]
        for var, value in zip(eqn.outvars, _flow(eqn, inputs, reasons, rows), strict=True):
            env[var] = value


def _flow(eqn: Any, inputs: Sequence[_Value], reasons: dict[str, None], rows: _Rows) -> list[_Value]:
    name = eqn.primitive.name
    if name in _RANDOM:
        reasons.setdefault("random keys (dropout) give each microbatch its own numbers")
        return [_Value(_FREE)] * len(eqn.outvars)
    status = max((v.status for v in inputs), default=_FREE)
    if status == _FREE:
        return [_Value(_FREE)] * len(eqn.outvars)
    if status == _COUPLED:
        return [_Value(_COUPLED)] * len(eqn.outvars)
    if status == _SUMMED:
        return [_Value(_after_sum(name, inputs))] * len(eqn.outvars)
    body = _body(eqn, inputs, rows)
    if body is not None:
        jaxpr, env, unpack = body
        _walk(jaxpr, env, reasons, rows)
        return unpack([_Value(_FREE) if isinstance(a, _compat.Literal) else env[a] for a in jaxpr.outvars])
    return _through_rule(eqn, inputs, rows)


def _after_sum(name: str, inputs: Sequence[_Value]) -> int:
    """A sum over rows may only be scaled and added to its like."""
    statuses = [v.status for v in inputs]
    if name in _LINEAR and all(s in (_FREE, _SUMMED) for s in statuses):
        return _SUMMED
    if (
        name in _SCALING
        and statuses.count(_SUMMED) == 1
        and statuses[0] == _SUMMED
        and statuses.count(_FREE) == len(statuses) - 1
    ):
        return _SUMMED
    if name == "mul" and statuses.count(_SUMMED) == 1 and statuses.count(_FREE) == 1:
        return _SUMMED
    return _COUPLED


def _through_rule(eqn: Any, inputs: Sequence[_Value], rows: _Rows) -> list[_Value]:
    rule = rows.rules.rule_of(eqn)
    coupled = [_Value(_COUPLED)] * len(eqn.outvars)
    if rule is None:
        return coupled
    factors: set[int] = set()
    for value, dims in zip(inputs, rule.operands, strict=True):
        if value.status != _ROWS:
            continue
        if value.dim is None or value.dim >= len(dims):
            return coupled
        dim = dims[value.dim]
        # Rows are the major part of their dim. A regrouping that splits them mixes them with what follows.
        if not dim or rule.sizes[dim[0]] % rows.num:
            return coupled
        factors.add(dim[0])
    if len(factors) > 1 or factors & rule.fixed:
        return coupled
    (factor,) = factors
    out = []
    for dims in rule.results:
        where = [i for i, dim in enumerate(dims) if dim and dim[0] == factor]
        if where:
            out.append(_Value(_ROWS, where[0]))
        elif rule.reduced.get(factor) == "sum" and eqn.primitive.name == "reduce_sum":
            out.append(_Value(_SUMMED))
        else:
            out.append(_Value(_COUPLED))
    return out


def _body(eqn: Any, inputs: Sequence[_Value], rows: _Rows) -> Any:
    """Body of a call, scan or custom rule, with its environment and how its results come out."""
    name = eqn.primitive.name
    if name == "scan":
        jaxpr, _ = _compat.inner_jaxpr(eqn)
        num_consts, num_carry = _compat.scan_sizes(eqn)
        stacked = num_consts + num_carry
        inner = [
            v if i < stacked or v.dim is None else _Value(_COUPLED if v.dim == 0 else v.status, v.dim - 1)
            for i, v in enumerate(inputs)
        ]
        env = _bind(jaxpr, _settle(jaxpr, inner, num_consts, num_carry, rows))

        def unpack(outs: list[_Value]) -> list[_Value]:
            return [v if i < num_carry or v.dim is None else _Value(v.status, v.dim + 1) for i, v in enumerate(outs)]

        return jaxpr, env, unpack
    if name in ("cond", "while"):
        return None
    try:
        jaxpr, _ = _compat.inner_jaxpr(eqn)
    except KeyError:
        return None
    if len(jaxpr.invars) != len(inputs):
        return None
    return jaxpr, _bind(jaxpr, inputs), list


def _settle(jaxpr: Any, inner: list[_Value], num_consts: int, num_carry: int, rows: _Rows) -> list[_Value]:
    """Raise the carry until another iteration changes nothing."""
    current = list(inner)
    for _ in range(4):
        env = _bind(jaxpr, current)
        _walk(jaxpr, env, {}, rows)
        outs = [_Value(_FREE) if isinstance(a, _compat.Literal) else env[a] for a in jaxpr.outvars[:num_carry]]
        changed = False
        for k, out in enumerate(outs):
            old = current[num_consts + k]
            if (out.status, out.dim) != (old.status, old.dim) and out.status >= old.status:
                same_rows = out.status == old.status == _ROWS and out.dim != old.dim
                current[num_consts + k] = _Value(_COUPLED) if same_rows else out
                changed = True
        if not changed:
            break
    return current


def _bind(jaxpr: Any, values: Sequence[_Value]) -> dict[Any, _Value]:
    env = {var: _Value(_FREE) for var in jaxpr.constvars}
    env.update(zip(jaxpr.invars, values, strict=True))
    return env
