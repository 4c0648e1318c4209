"""Run equations, constraining the values that a plan names.

The constraints are ``with_sharding_constraint`` on a mesh with the axes dp and tp; XLA's partitioner
does the rest. Inside scans, rematerialised blocks and calls the equations are emitted again, so that
constraints reach in; custom derivative rules are kept whole, for inlining them would lose the rule.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from arena_jax.compiler import _compat
from arena_jax.grid import Spec

# Their derivatives need their operands, and not their results.
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})


class Emitter:
    """Evaluates equations under a mesh and the activation specs of a plan.

    Args:
        mesh: the stage's mesh, or ``None`` to constrain nothing.
        specs: value key (``"12:0"``, ``"12/3:0"``; ``"12<1"`` is an operand) -> partition spec.
        remat_scans: recompute the bodies of outermost scans in the backward pass.
    """

    def __init__(self, mesh: Mesh | None, specs: Mapping[str, Spec], *, remat_scans: bool = False) -> None:
        self.mesh = mesh
        self.remat_scans = remat_scans
        self.specs = specs if mesh is not None and mesh.size > 1 else {}
        self._prefixes = {re.split("[:<]", key)[0].rpartition("/")[0] for key in self.specs}
        for prefix in list(self._prefixes):
            while "/" in prefix:
                prefix = prefix.rpartition("/")[0]
                self._prefixes.add(prefix)

    def run(
        self, equations: Sequence[tuple[str, Any]], env: dict[Any, Any], slices: Collection[Any] = frozenset()
    ) -> None:
        """Evaluate keyed equations in order, reading from and writing to ``env``.

        Args:
            slices: variables that a scan slices from its stacks.
        """

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, _compat.Literal) else env[atom]

        for key, eqn in equations:
            args = [read(a) for a in eqn.invars]
            evaluate: Callable[..., list[Any]] = partial(self._laid_out, key, eqn)
            if eqn.primitive.name in _PRODUCTS and self._constrains_one_of(slices, key, eqn):
                # A constrained slice is a value of its own, of which jax would keep a second stack for the backward
                # pass: there the constraint is applied anew instead. No product runs twice for that.
                evaluate = jax.checkpoint(evaluate, prevent_cse=False)
            outs = evaluate(*args)
            for i, (var, value) in enumerate(zip(eqn.outvars, outs, strict=True)):
                env[var] = self._constrain(f"{key}:{i}", value)

    def _laid_out(self, key: str, eqn: Any, *args: Any) -> list[Any]:
        """One equation on operands that lie as the plan says."""
        return self._eqn(key, eqn, [self._constrain(f"{key}<{i}", x) for i, x in enumerate(args)])

    def _constrains_one_of(self, slices: Collection[Any], key: str, eqn: Any) -> bool:
        return any(
            f"{key}<{i}" in self.specs and not isinstance(a, _compat.Literal) and a in slices
            for i, a in enumerate(eqn.invars)
        )

    def _jaxpr(
        self,
        prefix: str,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        slices: Collection[Any] = frozenset(),
    ) -> list[Any]:
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env.update(zip(jaxpr.invars, args, strict=True))
        self.run([(f"{prefix}/{i}", eqn) for i, eqn in enumerate(jaxpr.eqns)], env, slices)
        return [a.val if isinstance(a, _compat.Literal) else env[a] for a in jaxpr.outvars]

    def _eqn(self, key: str, eqn: Any, args: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name == "scan" and self.remat_scans and "/" not in key:
            return self._scan(key, eqn, args, remat=True)
        if key not in self._prefixes:
            return _compat.bind(eqn, args)
        if name in _compat.INLINED:
            jaxpr, consts = _compat.inner_jaxpr(eqn)
            return self._jaxpr(key, jaxpr, consts, args)
        if name in _compat.REMAT:
            jaxpr, consts = _compat.inner_jaxpr(eqn)
            again = jax.checkpoint(
                lambda *a: self._jaxpr(key, jaxpr, consts, a),
                policy=eqn.params.get("policy"),
                prevent_cse=eqn.params.get("prevent_cse", True),
            )
            return list(again(*args))
        if name == "scan":
            return self._scan(key, eqn, args)
        return _compat.bind(eqn, args)

    def _scan(self, key: str, eqn: Any, args: list[Any], *, remat: bool = False) -> list[Any]:
        jaxpr, body_consts = _compat.inner_jaxpr(eqn)
        num_consts, num_carry = _compat.scan_sizes(eqn)
        consts, carry, xs = args[:num_consts], args[num_consts : num_consts + num_carry], args[num_consts + num_carry :]

        slices = frozenset(() if remat else jaxpr.invars[num_consts + num_carry :])

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = self._jaxpr(key, jaxpr, body_consts, [*consts, *carry, *x], slices)
            return outs[:num_carry], outs[num_carry:]

        final, ys = lax.scan(
            jax.checkpoint(body, prevent_cse=False) if remat else body,
            carry,
            xs,
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*final, *ys]

    def _constrain(self, key: str, value: Any) -> Any:
        spec = self.specs.get(key)
        if spec is None or self.mesh is None:
            return value
        return lax.with_sharding_constraint(value, NamedSharding(self.mesh, self._fitting(spec, value.shape)))

    def _fitting(self, spec: Spec, shape: tuple[int, ...]) -> PartitionSpec:
        """The spec without axes that do not divide their dim: it was chosen at the size of the global batch."""
        assert self.mesh is not None
        sizes = dict(self.mesh.shape)
        dims = []
        for dim, size in zip(spec, shape, strict=False):
            axes = (dim,) if isinstance(dim, str) else dim or ()
            dims.append(dim if size % math.prod(sizes[a] for a in axes) == 0 else None)
        return PartitionSpec(*dims)
