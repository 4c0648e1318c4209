"""How a user says that values lie: annotations of parameters, constraints in the traced loss.

Both name axes of the user's own mesh, or logical axes that flax's rules map to them. ``axis_rules``
maps those to dp and tp; what comes of it is a hard constraint of the search.
"""

import ast
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from flax import nnx
from flax.core import spmd
from jax.sharding import PartitionSpec

from arena_jax.compiler import _compat
from arena_jax.compiler.intra_op.layout import DP, NAMES, TP, Layout, MeshShape
from arena_jax.compiler.meshless import CONSTRAINT
from arena_jax.errors import UsageError, nearest

DEFAULT_RULES: Mapping[str, str | None] = {
    **dict.fromkeys(("dp", "data", "batch", "fsdp"), "dp"),
    **dict.fromkeys(("tp", "model", "tensor", "mp"), "tp"),
}
"""The user's axis name -> ``"dp"``, ``"tp"``, or ``None`` for an axis that shards nothing."""

_MASKS = {None: 0, "dp": DP, "tp": TP}
_OPEN = PartitionSpec.UNCONSTRAINED
# Names of one dim: none, one, several, or whatever the search likes.
DimNames = None | str | tuple[str, ...] | Any


@dataclass(frozen=True)
class Required:
    """How a value has to lie.

    Attributes:
        dims: per dim the axes it is sharded over, as in a :data:`Layout`; ``None`` leaves it to the search.
        shape: of the value.
        what: who asks for it, for messages.
    """

    dims: tuple[int | None, ...]
    shape: tuple[int, ...]
    what: str

    @property
    def is_whole_over_dp(self) -> bool:
        """Whether dp may not shard the value."""
        return all(axes is not None and not axes & DP for axes in self.dims)

    def layouts(self, mesh: MeshShape) -> tuple[Layout, ...]:
        """The layouts on a mesh that agree; axes of size 1 shard nothing."""
        real = sum(mesh.axes)
        fixed = [0 if axes is None else axes & real for axes in self.dims]
        free = [axis for axis in mesh.axes if not any(axes & axis for axes in fixed)]
        places = [d for d, axes in enumerate(self.dims) if axes is None]
        found: dict[Layout, None] = {}
        for choice in itertools.product((None, *places), repeat=len(free)):
            layout = list(fixed)
            for axis, dim in zip(free, choice, strict=True):
                if dim is not None:
                    layout[dim] |= axis
            if all(mesh.fits(size, axes) for size, axes in zip(self.shape, layout, strict=True)):
                found[tuple(layout)] = None
        return tuple(found)

    def allows(self, layout: Layout, mesh: MeshShape) -> bool:
        """Whether a layout agrees on a mesh."""
        real = sum(mesh.axes)
        wanted = zip(self.dims, layout, strict=True)
        return all(axes is None or axes & real == given & real for axes, given in wanted)

    def fault(self, mesh: MeshShape) -> str:
        """Why the value cannot lie so on a mesh; empty where it can."""
        for dim, (size, axes) in enumerate(zip(self.shape, self.dims, strict=True)):
            if axes and not mesh.fits(size, axes):
                over = " x ".join(f"{NAMES[a]} {mesh.sizes[a]}" for a in (DP, TP) if axes & a)
                return f"{self.what} shards dim {dim} of {size}, which {over} does not divide"
        return ""


class AxisRules:
    """Maps the user's axis names to dp and tp.

    Args:
        given: the user's rules, beside :data:`DEFAULT_RULES`.

    Raises:
        UsageError: a rule to something else than ``dp``, ``tp`` or ``None``.
    """

    def __init__(self, given: Mapping[str, str | None] | None = None) -> None:
        self._given = dict(given or {})
        for name, axis in self._given.items():
            if not isinstance(name, str) or axis not in _MASKS:
                guess = nearest(axis, ("dp", "tp")) if isinstance(axis, str) else ""
                raise UsageError(
                    f"axis_rules maps {name!r} to {axis!r}, which is no axis of a plan{guess}",
                    hint="map each of your axis names to 'dp' or 'tp', or to None where it shards nothing",
                )

    def require(
        self, names: Sequence[DimNames], shape: Sequence[int], what: str, logical: Sequence[tuple[str, Any]] = ()
    ) -> Required:
        """What a spec asks of a value.

        Args:
            names: per dim, the user's axes; missing dims are whole.
            logical: flax's rules, logical axis -> axes of the user's mesh, the first that is free counts.

        Raises:
            UsageError: an unknown axis, or a spec that contradicts itself or the shape.
        """
        if len(names) > len(shape):
            raise UsageError(
                f"{what} has {len(names)} dims, the value has {len(shape)}: {tuple(shape)}",
                hint="an annotation has an entry a dim at most",
            )
        dims: list[int | None] = []
        owner: dict[int, tuple[int, str]] = {}
        taken: set[str] = set()
        for dim, entry in enumerate((*names, *(None,) * (len(shape) - len(names)))):
            if entry is _OPEN:
                dims.append(None)
                continue
            axes = 0
            for name in (entry,) if isinstance(entry, str) else entry or ():
                axes |= self._axes(name, what, logical, taken)
            for axis in (DP, TP):
                if axes & axis and axis in owner:
                    other, theirs = owner[axis]
                    raise UsageError(
                        f"{what} shards dim {other} by {theirs} and dim {dim} by {entry!r}, and both are {NAMES[axis]}",
                        hint=f"map one of them to {NAMES[axis ^ DP ^ TP]!r} or to None in axis_rules",
                    )
                if axes & axis:
                    owner[axis] = dim, repr(entry)
            dims.append(axes)
        return Required(tuple(dims), tuple(shape), what)

    def _axes(self, name: str, what: str, logical: Sequence[tuple[str, Any]], taken: set[str]) -> int:
        """Axes that a name stands for; ``taken`` are those of the user's mesh that earlier dims have."""
        targets = [_names(target) for alias, target in logical if alias == name and target != name]
        if not targets:
            taken.add(name)
            return self._own(name, what, [alias for alias, _ in logical])
        inside = f"{what}, whose {name!r} is {' and '.join(map(repr, targets[0]))} by flax's rules,"
        axes = self._all(targets[0], inside)
        if name in self._given and _MASKS[self._given[name]] != axes:
            raise UsageError(
                f"{what}: axis_rules says that {name!r} is {self._given[name] or 'whole'}, and flax's rules that it "
                f"is {' and '.join(map(repr, targets[0])) or 'whole'}{_which(axes)}",
                hint=f"leave {name!r} out of axis_rules, or change one of the two",
            )
        for target in targets:
            if not taken.intersection(target):
                taken.update(target)
                return self._all(target, inside)
        return 0

    def _all(self, names: Sequence[str], what: str) -> int:
        axes = 0
        for name in names:
            axes |= self._own(name, what, ())
        return axes

    def _own(self, name: str, what: str, aliases: Sequence[str]) -> int:
        rules = {**DEFAULT_RULES, **self._given}
        if name not in rules:
            raise UsageError(
                f"{what} names an unknown axis {name!r}{nearest(name, (*rules, *aliases))}",
                hint=f"say what it is: axis_rules={{{name!r}: 'dp'}} or 'tp', or None where it shards nothing",
            )
        return _MASKS[rules[name]]


@dataclass(frozen=True)
class Annotations:
    """What a traced program requires of its values.

    Attributes:
        leaves: leaf number -> how the parameter lies.
        values: name and shape of a constraint's identity -> how its value lies.
    """

    leaves: Mapping[int, Required] = field(default_factory=dict)
    values: Mapping[tuple[str, tuple[int, ...]], Required] = field(default_factory=dict)

    def of(self, eqn: Any) -> Required | None:
        """What an equation requires of its result; ``None`` where it is no constraint."""
        if eqn.primitive.name != "name":
            return None
        return self.values.get((eqn.params["name"], tuple(eqn.outvars[0].aval.shape)))

    def fault(self, dp: int, tp: int) -> str:
        """Why a mesh cannot hold the program; empty where it can."""
        mesh = MeshShape(dp, tp)
        required = (*self.leaves.values(), *self.values.values())
        return next((fault for r in required if (fault := r.fault(mesh))), "")

    def key(self) -> list[Any]:
        """All of it as JSON."""
        leaves = [[number, list(r.dims)] for number, r in sorted(self.leaves.items())]
        return leaves + sorted([name, list(shape), list(r.dims)] for (name, shape), r in self.values.items())


def annotation_of(variable: Any, name: str, shape: Sequence[int], rules: AxisRules) -> Required | None:
    """What a variable's metadata asks of its value, flax's logical rules in force included."""
    metadata = variable.get_metadata() if isinstance(variable, nnx.Variable) else {}
    spec = metadata.get("out_sharding")
    spec = getattr(spec, "sharding", spec)  # of a layout with a sharding
    spec = getattr(spec, "spec", spec)
    if not spec:
        return None
    names = tuple(spec)
    what = f"the annotation {names} of {name}"
    own, context = (tuple(rules or ()) for rules in (metadata.get("sharding_rules"), spmd.get_logical_axis_rules()))
    for alias, target in own:
        others = [theirs for theirs_alias, theirs in context if theirs_alias == alias]
        if alias in names and others and target not in others:
            raise UsageError(
                f"{what}: its own rules say that {alias!r} is {target!r}, the rules in force that it is {others[0]!r}",
                hint="change one of the two",
            )
    return rules.require(names, shape, what, (*own, *context))


def pinned(
    specs: Mapping[str, Sequence[DimNames]],
    shapes: Mapping[str, tuple[int, ...]],
    annotations: Mapping[str, Required],
    rules: AxisRules,
) -> dict[str, Required]:
    """What the user's pins ask of parameters.

    Args:
        specs: name of a parameter, or a pattern as in a shell -> names of axes, dim by dim.
        shapes: of all parameters, by name.
        annotations: what the model itself asks; a pin fills in what that leaves to the search.

    Raises:
        UsageError: a pattern without a parameter, or two pins, or a pin and an annotation, that contradict.
    """
    found: dict[str, Required] = {}
    for pattern, dims in specs.items():
        names = [name for name in shapes if fnmatchcase(name, pattern)]
        if not names:
            raise UsageError(
                f"no parameter is called {pattern!r}{nearest(pattern, shapes)}",
                hint=f"a name or a pattern, such as {next(iter(shapes))!r}",
            )
        for name in names:
            what = f"the pin {list(dims)} of {name} ({pattern!r})"
            asked = rules.require([tuple(d) if isinstance(d, list) else d for d in dims], shapes[name], what)
            other = found.get(name) or annotations.get(name)
            theirs = asked.dims if other is None else other.dims
            both = [mine if their is None else their for mine, their in zip(asked.dims, theirs, strict=True)]
            if any(mine not in (None, dim) for mine, dim in zip(asked.dims, both, strict=True)):
                raise UsageError(
                    f"{what} contradicts {'' if other is None else other.what}",
                    hint="change one of the two, or what their axes are in axis_rules",
                )
            found[name] = replace(asked, dims=tuple(both))
    return found


def required_in(jaxpr: Any, rules: AxisRules) -> dict[tuple[str, tuple[int, ...]], Required]:
    """All constraints of a program, by name and shape of the identity that stands for each."""
    found: dict[tuple[str, tuple[int, ...]], Required] = {}
    lost: dict[str, None] = {}
    for eqn, stays in _names_in(jaxpr, True):
        text, shape = eqn.params["name"], tuple(eqn.outvars[0].aval.shape)
        if not text.startswith(CONSTRAINT):
            continue
        names = ast.literal_eval(text.removeprefix(CONSTRAINT).replace(str(_OPEN), "..."))
        what = f"the constraint {text.removeprefix(CONSTRAINT)} on a value of shape {shape}"
        found[text, shape] = rules.require([_OPEN if n is ... else n for n in names], shape, what)
        if not stays:
            lost[what] = None
    for what in lost:
        warnings.warn(
            f"{what} is not kept: it is inside a branch, an unbounded loop or a function with a derivative of its own",
            stacklevel=4,
        )
    return found


def _names_in(jaxpr: Any, stays: bool) -> Iterator[tuple[Any, bool]]:
    """Equations that name a value, and whether the emitter reaches them."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "name":
            yield eqn, stays
            continue
        reached = name == "scan" or name in _compat.INLINED or name in _compat.REMAT
        for value in eqn.params.values():
            for part in value if isinstance(value, list | tuple) else (value,):
                if hasattr(part, "eqns") or hasattr(part, "jaxpr"):
                    yield from _names_in(_compat.open_jaxpr(part)[0], stays and reached)


def _names(target: Any) -> tuple[str, ...]:
    return () if target is None else (target,) if isinstance(target, str) else tuple(target)


def _which(axes: int) -> str:
    return f", which is {' and '.join(NAMES[a] for a in (DP, TP) if axes & a)}" if axes else ""
