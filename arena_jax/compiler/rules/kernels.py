"""Rules of kernels that nobody can look into, by the name they were given.

A kernel's rule comes from, first that exists: :func:`sharding_rule`; the rule that its own author
attached (``custom_partitioning``); its specs (``shard_map``); its reference implementation. Without
any of these it is unknown: every device runs all of it.
"""

import warnings
from collections.abc import Callable, Collection
from typing import Any

from arena_jax.compiler.rules.einsum import TextRule, parse
from arena_jax.compiler.rules.rule import Dim, Dims, Factors, Rule, shape_of
from arena_jax.errors import UsageError

KERNELS = frozenset(
    {
        "pallas_call",
        "ffi_call",
        "custom_partitioning",
        "shard_map",
        "dot_product_attention_fwd_wrapper",
        "dot_product_attention_fwd",
        "dot_product_attention_fp8_fwd_wrapper",
        "dot_product_attention_fp8_fwd",
        "scaled_matmul_wrapper",
        "scaled_matmul",
        "cudnn_fusion",
    }
)
_registered: dict[str, TextRule] = {}


def sharding_rule(
    name: str, rule: str, *, reduced: str | Collection[str] = (), fixed: str | Collection[str] = ()
) -> None:
    """Say how a kernel can be split, so that planning does not replicate it.

    The rule says what the plan may assume; splitting itself is the kernel's (``custom_partitioning``,
    ``shard_map`` around it) or XLA's. It also gives the kernel's FLOPs where it declares none.

    Args:
        name: the ``name`` of a ``pallas_call``, the target of an FFI call, or the name of a primitive or of
            a function with a custom derivative.
        rule: dims of operands and results by name, such as ``"b h s d, b h t d, b h t d -> b h s d"``: equal
            names are split together. ``.`` is a dim that stays whole, ``(k g)`` a dim of two factors,
            major first. Operands behind those that are named stay whole.
        reduced: names in operands only whose partial results add up; others in operands only stay whole.
        fixed: names that stay whole though results have them, as the positions of causal attention.

    Raises:
        UsageError: the rule cannot be read.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"the kernel's name is {name!r}", hint="give the name that the traced program shows")
    _registered[name] = parse(rule, reduced=reduced, fixed=fixed)


def registered_rules() -> dict[str, str]:
    """Rules that were registered, as text; plans depend on them."""
    return {name: f"{r.text} reduced={sorted(r.reduced)} fixed={sorted(r.fixed)}" for name, r in _registered.items()}


def kernel_names(eqn: Any) -> list[str]:
    """What an equation can be registered under, the most specific first."""
    found = [eqn.params.get("name"), eqn.params.get("target_name"), eqn.primitive.name]
    for key in ("call_jaxpr", "fun_jaxpr", "jaxpr", "call"):
        body = eqn.params.get(key)
        info = getattr(getattr(body, "jaxpr", body), "debug_info", None)
        name = getattr(info, "func_name", "")
        if name:
            found.insert(1, name.split(" ")[0])
            break
    return [str(name) for name in found if name]


def kernel_rule(eqn: Any) -> Rule | None:
    """The rule of a kernel, or of anything that a rule was registered for; ``None`` where there is none."""
    if _registered:
        for name in kernel_names(eqn):
            if name in _registered:
                return _of_text(_registered[name], eqn, name)
    make = _SHIPPED.get(eqn.primitive.name)
    return None if make is None else make(eqn)


def _of_text(text: TextRule, eqn: Any, name: str) -> Rule | None:
    try:
        return text.rule([shape_of(a) for a in eqn.invars], [shape_of(v) for v in eqn.outvars])
    except ValueError as error:
        warnings.warn(f"the sharding rule of {name!r} does not fit: {error}; it is replicated", stacklevel=2)
        return None


def _attention(eqn: Any) -> Rule | None:
    """cuDNN's attention: samples and heads; positions stay whole, for masks and windows count them."""
    q, kv = ("b (k g) t h", "b k s h") if "BNTH" in str(eqn.params.get("layout")) else ("b t (k g) h", "b s k h")
    operands = [q, kv, kv]
    # A bias has the dims of the scores, any of which may be 1; operands that are not used are empty vectors.
    if len(eqn.invars) > 3 and len(shape_of(eqn.invars[3])) == 4:
        operands.append("b (k g) t s")
    # Behind the output come, in training, the scores' normaliser per row, and the scales of an fp8 kernel.
    results = [q]
    for var in eqn.outvars[1:]:
        shape = shape_of(var)
        results.append("b (k g) t" if len(shape) == 3 else " ".join("." for _ in shape))
    text = f"{', '.join(operands)} -> {', '.join(results)}"
    return _of_text(parse(text, fixed="t h"), eqn, eqn.primitive.name)


def _scaled_matmul(eqn: Any) -> Rule | None:
    """Block-scaled product; the contracted dim stays whole, for its blocks have scales of their own."""
    return _of_text(parse("b m c, b n c, b m ., b n . -> b m n"), eqn, eqn.primitive.name)


def _custom_partitioning(eqn: Any) -> Rule | None:
    """The author's own rule in Shardy's form."""
    shardy = eqn.params.get("sharding_rule")
    if not hasattr(shardy, "operand_mappings"):
        return None
    operands = zip(shardy.operand_mappings, eqn.invars, strict=True)
    results = zip(shardy.result_mappings, eqn.outvars, strict=True)
    rule = TextRule(
        text=str(shardy),
        operands=tuple(_names(mapping, len(shape_of(a))) for mapping, a in operands),
        results=tuple(_names(mapping, len(shape_of(v))) for mapping, v in results),
        reduced=frozenset(shardy.reduction_factors),
        fixed=frozenset((*shardy.need_replication_factors, *shardy.permutation_factors)),
        known_sizes=dict(shardy.factor_sizes),
    )
    return _of_text(rule, eqn, "custom_partitioning")


def _names(mapping: Any, rank: int) -> tuple[tuple[str, ...], ...]:
    """Factors per dim of a Shardy mapping; leading dims under an ellipsis are named by their place."""
    dims: list[tuple[str, ...]] = []
    for factor in mapping:
        if not isinstance(factor, str):
            dims.append(tuple(factor))
        elif factor.startswith(("...", "\u2026")):
            dims.extend((f"{factor}{k}",) for k in range(rank - len(mapping) + 1))
        else:
            dims.append((factor,))
    return tuple(dims)


def _shard_map(eqn: Any) -> Rule | None:
    """What the specs say: the parts over one of its mesh axes lie together, the rest of each dim is whole.

    The number of parts is the axis' size in the mesh that the model was written for.
    """
    mesh = eqn.params["mesh"]
    specs = [*_specs(eqn, "in"), *_specs(eqn, "out")]
    arrays = [shape_of(a) for a in (*eqn.invars, *eqn.outvars)]
    factors = Factors()
    parts: dict[str, Dim] = {axis: factors.new(size) for axis, size in mesh.shape.items()}
    fixed: set[int] = set()

    def dims(shape: tuple[int, ...], spec: Any) -> Dims:
        out: list[Dim] = []
        for i, n in enumerate(shape):
            entry = spec[i] if i < len(spec) else None
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            lead: Dim = ()
            for axis in axes:
                lead = (*lead, *parts[axis])
                n //= mesh.shape[axis]
            rest = factors.new(n)
            fixed.update(rest)
            out.append((*lead, *rest))
        return tuple(out)

    made = [dims(shape, spec) for shape, spec in zip(arrays, specs, strict=True)]
    return Rule(made[: len(eqn.invars)], made[len(eqn.invars) :], factors.sizes, fixed=fixed)


def _specs(eqn: Any, side: str) -> list[Any]:
    if f"{side}_specs" in eqn.params:
        return [tuple(spec) for spec in eqn.params[f"{side}_specs"]]
    # Older form: per array a map from dim to axes.
    return [[names.get(i) for i in range(max(names, default=-1) + 1)] for names in eqn.params[f"{side}_names"]]


_SHIPPED: dict[str, Callable[[Any], Rule | None]] = {
    "dot_product_attention_fwd_wrapper": _attention,
    "dot_product_attention_fwd": _attention,
    "dot_product_attention_fp8_fwd_wrapper": _attention,
    "dot_product_attention_fp8_fwd": _attention,
    "scaled_matmul_wrapper": _scaled_matmul,
    "scaled_matmul": _scaled_matmul,
    "custom_partitioning": _custom_partitioning,
    "shard_map": _shard_map,
}
