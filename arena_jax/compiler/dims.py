"""How the dims of an equation's operands and results correspond, for any equation of a trace.

:func:`rule_of` finds the rule of a primitive (:mod:`arena_jax.compiler.rules`, one module per family),
of a kernel that has been described, or of a loop or branch from the rules of what is inside.
"""

import math
from collections.abc import Hashable
from typing import Any

from arena_jax.compiler import _compat
from arena_jax.compiler.rules import indexing, linear, products, shapes
from arena_jax.compiler.rules.composed import composed
from arena_jax.compiler.rules.elementwise import ELEMENTWISE as ELEMENTWISE
from arena_jax.compiler.rules.elementwise import SOURCES as SOURCES
from arena_jax.compiler.rules.kernels import KERNELS, kernel_names, kernel_rule
from arena_jax.compiler.rules.reductions import CUMULATIVE as CUMULATIVE
from arena_jax.compiler.rules.reductions import REDUCTIONS as REDUCTIONS
from arena_jax.compiler.rules.rule import RULES, Dims, shape_of
from arena_jax.compiler.rules.rule import Rule as Rule

__all__ = ["CUMULATIVE", "ELEMENTWISE", "REDUCTIONS", "SOURCES", "Rule", "RuleBook", "rule_of", "unknown_primitives"]

# Imported for what they register.
_FAMILIES = (indexing, linear, products, shapes)
# Bodies that run a number of times that is not known, or that XLA partitions by itself. Others (calls,
# scans, rematerialised blocks, custom derivatives) are entered by whoever asks.
_COMPOSED = frozenset({"while", "cond", "custom_partitioning", "linear_call"})


def rule_of(eqn: Any) -> Rule | None:
    """The rule of an equation, or ``None`` when its primitive is unknown or a call.

    An equation whose parameters are not as expected (another version of jax, a use that nobody thought
    of) counts as unknown: it is then replicated and named, which is slow but right.
    """
    try:
        rule = kernel_rule(eqn) or _by_name(eqn)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        return None
    return rule if rule is not None and _fits(rule, eqn) else None


class RuleBook:
    """Rules of a program's equations; equal equations, as repeated layers have them, are looked at once.

    Rules read an equation's primitive, parameters and shapes, nothing else.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Rule | None] = {}

    def rule_of(self, eqn: Any) -> Rule | None:
        """As :func:`rule_of`; not to be changed."""
        try:
            signature = _signature(eqn)
            if signature not in self._known:
                self._known[signature] = rule_of(eqn)
            return self._known[signature]
        except TypeError:  # a parameter that has no hash
            return rule_of(eqn)


def _signature(eqn: Any) -> Hashable:
    shapes = tuple([shape_of(atom) for atom in (*eqn.invars, *eqn.outvars)])
    return eqn.primitive, len(eqn.invars), shapes, frozenset(eqn.params.items())


def unknown_primitives(jaxpr: Any, rules: RuleBook | None = None) -> list[str]:
    """Names of what nobody described, bodies of calls and loops included, in order of appearance."""
    rules = rules or RuleBook()
    found: dict[str, None] = {}
    for eqn in jaxpr.eqns:
        bodies = _bodies(eqn)
        for body in bodies:
            found.update(dict.fromkeys(unknown_primitives(body, rules)))
        if not bodies and rules.rule_of(eqn) is None:
            name = eqn.primitive.name
            found[f"{name} {kernel_names(eqn)[0]!r}" if name in KERNELS else name] = None
    return list(found)


def _bodies(eqn: Any) -> list[Any]:
    params = eqn.params
    if "branches" in params or "body_jaxpr" in params:
        return [_compat.open_jaxpr(b)[0] for b in params.get("branches", (params.get("body_jaxpr"),))]
    try:
        return [] if kernel_rule(eqn) is not None else [_compat.inner_jaxpr(eqn)[0]]
    except KeyError:
        return []


def _by_name(eqn: Any) -> Rule | None:
    name = eqn.primitive.name
    if name in _COMPOSED:
        return composed(eqn, rule_of)
    return RULES[name](eqn) if name in RULES else None


def _fits(rule: Rule, eqn: Any) -> bool:
    """Whether a rule describes the equation's own shapes."""
    arrays = [*zip(eqn.invars, rule.operands, strict=False), *zip(eqn.outvars, rule.results, strict=False)]
    if len(rule.operands) != len(eqn.invars) or len(rule.results) != len(eqn.outvars):
        return False
    return all(_made_of(shape_of(atom), dims, rule) for atom, dims in arrays)


def _made_of(shape: tuple[int, ...], dims: Dims, rule: Rule) -> bool:
    if len(shape) != len(dims):
        return False
    return all(not d or math.prod(rule.sizes[f] for f in d) == n for d, n in zip(dims, shape, strict=True))
