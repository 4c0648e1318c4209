"""A sharded program as one of its devices runs it without the others: the same operations at local shapes.

What travels between devices is left out; it is timed by itself. Where an operation reads a value in
another layout than it was made in, the local part is cut smaller, or repeated to the size that a
gather would give, so that its bytes are written as they would be.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from arena_jax.compiler import _compat
from arena_jax.compiler.intra_op.layout import Layout, MeshShape

Shape = tuple[int, ...]
# Key of an equation -> the layout of each operand as it is read, and of each result.
Layouts = Mapping[str, tuple[tuple[Layout, ...], tuple[Layout, ...]]]


class NotLocalError(Exception):
    """An equation that cannot be run at local shapes; its layer is not timed."""


class OneDevice:
    """Evaluates keyed equations at the shapes of one device.

    Attributes:
        lines: a canonical line for each operation that was run, in order.
    """

    def __init__(self, layouts: Layouts, mesh: MeshShape) -> None:
        self._layouts = layouts
        self._mesh = mesh
        self.lines: list[str] = []

    def run(self, equations: Sequence[tuple[str, Any]], env: dict[Any, Any]) -> None:
        """Evaluate keyed equations in order, reading from and writing to ``env``.

        Raises:
            NotLocalError: a scan, or an operation whose parameters hold shapes that nobody described.
        """
        for key, eqn in equations:
            args = [a.val if isinstance(a, _compat.Literal) else env[a] for a in eqn.invars]
            env.update(zip(eqn.outvars, self._eqn(key, eqn, args), strict=True))

    def _eqn(self, key: str, eqn: Any, args: Sequence[Any]) -> list[Any]:
        layouts = self._layouts.get(key)
        if layouts is None:
            return self._body(key, eqn, args)
        operands = [
            x if isinstance(a, _compat.Literal) else _fitted(x, local_shape(a.aval.shape, layout, self._mesh))
            for x, a, layout in zip(args, eqn.invars, layouts[0], strict=True)
        ]
        results = [
            local_shape(v.aval.shape, layout, self._mesh) for v, layout in zip(eqn.outvars, layouts[1], strict=True)
        ]
        params = _localised(eqn, [jnp.shape(x) for x in operands], results)
        try:
            outs = _compat.bind(eqn.replace(params=params), operands)
        except (TypeError, ValueError, AssertionError) as error:
            raise NotLocalError(f"{eqn.primitive}: {error}") from error
        if [x.shape for x in outs] != results:
            raise NotLocalError(f"{eqn.primitive} gives {[x.shape for x in outs]}, not {results}")
        moved = [f"{jnp.shape(x)}" for x, y in zip(args, operands, strict=True) if jnp.shape(x) != jnp.shape(y)]
        self.lines.append(f"{line_of(eqn, params, operands, outs)} {' '.join(moved)}")
        return outs

    def _body(self, key: str, eqn: Any, args: Sequence[Any]) -> list[Any]:
        """Enter a call, a rematerialised block or a custom derivative."""
        if eqn.primitive.name == "scan":
            raise NotLocalError("scan")
        try:
            jaxpr, consts = _compat.inner_jaxpr(eqn)
        except KeyError as error:
            raise NotLocalError(str(eqn.primitive)) from error
        env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
        self.run([(f"{key}/{i}", inner) for i, inner in enumerate(jaxpr.eqns)], env)
        return [a.val if isinstance(a, _compat.Literal) else env[a] for a in jaxpr.outvars]


def local_shape(shape: Shape, layout: Layout, mesh: MeshShape) -> Shape:
    """The part of a value that one device holds."""
    if not layout:
        return tuple(shape)
    if any(size % mesh.sizes[axes] for size, axes in zip(shape, layout, strict=True)):
        raise NotLocalError(f"{shape} does not divide as {layout}")
    return tuple(size // mesh.sizes[axes] for size, axes in zip(shape, layout, strict=True))


def line_of(eqn: Any, params: Mapping[str, Any], operands: Sequence[Any], results: Sequence[Any]) -> str:
    """An operation as text: equal for operations that do the same work on arrays of the same shapes."""
    shown = ";".join(f"{k}={v}" for k, v in sorted(params.items()) if not callable(v))
    shown = re.sub(r"0x[0-9a-f]+", "0x", shown)
    return f"{eqn.primitive}[{shown}] {' '.join(map(_typed, operands))} -> {' '.join(map(_typed, results))}"


def _typed(value: Any) -> str:
    value = getattr(value, "aval", value)
    return f"{getattr(value, 'dtype', type(value).__name__)}{list(jnp.shape(value))}"


def _fitted(value: Any, shape: Shape) -> Any:
    """The value cut, or repeated, to a shape."""
    for dim, size in enumerate(shape):
        have = value.shape[dim]
        if have > size and have % size == 0:
            value = lax.slice_in_dim(value, 0, size, axis=dim)
        elif have < size and size % have == 0:
            value = lax.concatenate([value] * (size // have), dim)
        elif have != size:
            raise NotLocalError(f"{value.shape} is no part or multiple of {shape}")
    return value


def _localised(eqn: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    """An equation's parameters with local sizes where they hold sizes."""
    params, name = dict(eqn.params), eqn.primitive.name
    if name in ("broadcast_in_dim", "iota", "random_bits"):
        params["shape"] = results[0]
    elif name == "reshape":
        params["new_sizes"] = results[0]
        if math.prod(results[0]) != math.prod(operands[0]):
            raise NotLocalError(f"reshape of {operands[0]} to {results[0]}")
    elif name == "slice":
        whole = eqn.invars[0].aval.shape
        limits = zip(params["limit_indices"], whole, operands[0], strict=True)
        params["limit_indices"] = tuple(local if limit == size else limit for limit, size, local in limits)
    elif name == "dynamic_slice":
        params["slice_sizes"] = results[0]
    elif name == "gather":
        whole = eqn.invars[0].aval.shape
        sizes = zip(params["slice_sizes"], whole, operands[0], strict=True)
        params["slice_sizes"] = tuple(local if limit == size else limit for limit, size, local in sizes)
    return params
