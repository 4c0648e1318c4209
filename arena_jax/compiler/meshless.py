"""Take a traced program off the mesh that its author had in mind.

A plan decides where things lie, on stages whose devices the model knows nothing of. So a program that
names a mesh is rewritten to say the same of whole arrays: explicit shardings are dropped, constraints
become identities that keep their spec by name, and a ``shard_map`` becomes a ``vmap`` over its parts
with the mesh axes' names, so that its collectives keep their meaning.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import linear_util

from arena_jax.compiler import _compat

CONSTRAINT = "sharding constraint "
"""What the name of an identity begins with that was a constraint; its spec follows."""

_CONSTRAINTS = frozenset({"sharding_constraint", "reshard", "mesh_cast"})
# Where `out_sharding` is what the author asks for; elsewhere jax may have filled it in.
_ASKED = frozenset({"dot_general", "gather"})
# Inside a shard_map: what only changes how a value is typed.
_TYPING = frozenset({"pvary", "pcast", "pbroadcast", "preduced", "vary_unreduced_cast", "reduced_vary_cast"})
_CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"})


def names_a_mesh(jaxpr: Any) -> bool:
    """Whether a program says anywhere on which mesh it lies."""
    if any(_is_placed(v.aval) for v in jaxpr.invars):
        return True
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "shard_map" or name in _CONSTRAINTS or any(_is_placed(v.aval) for v in eqn.outvars):
            return True
        if name == "device_put" and any(d is not None for d in eqn.params.get("devices", ())):
            return True
        if any(names_a_mesh(body) for body in _bodies(eqn)):
            return True
    return False


def run_without_mesh(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a program on whole arrays; under a trace this rewrites it. No mesh may be set around it."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        # A literal's type names the mesh, too.
        if not isinstance(atom, _compat.Literal):
            return env[atom]
        aval: Any = atom.aval
        return np.asarray(atom.val, aval.dtype)

    for eqn in jaxpr.eqns:
        outs = _equation(eqn, [read(a) for a in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(a) for a in jaxpr.outvars]


def _equation(eqn: Any, args: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in _CONSTRAINTS:
        sharding = params.get("sharding", params.get("dst_sharding"))
        spec = getattr(sharding, "spec", None)
        # Inside a shard_map it is of the parts, which no plan knows.
        return args if spec is None or _is_of_parts(eqn) else [_required(args[0], spec)]
    if name in _TYPING or name == "device_put":
        return args
    if name == "shard_map":
        return _shard_map(eqn, args)
    if name == "psum_invariant":
        return [lax.psum(args[0], tuple(params["axes"]))]
    if name == "all_gather_invariant":
        gathered = {"axis": params["all_gather_dimension"], "tiled": params["tiled"]}
        return [lax.all_gather(args[0], params["axis_name"], **gathered)]
    if name == "all_to_all" and params["tiled"] and params["axis_index_groups"] is None:
        return [_all_to_all(args[0], params["axis_name"], params["split_axis"], params["concat_axis"])]
    if name in _CUSTOM:
        return _custom(eqn, args)
    if name in ("scan", "while", "cond") or name in _compat.REMAT or name in _compat.INLINED:
        return _structured(eqn, args)
    changed = {key: None for key in ("out_sharding", "sharding") if params.get(key) is not None}
    mesh = getattr(eqn.ctx, "cur_abstract_mesh", None)
    bare = mesh is None or not mesh.axis_names
    outs = _compat.bind(eqn.replace(params={**params, **changed}), args, in_context=bare)
    asked = getattr(params.get("out_sharding"), "spec", None) if name in _ASKED else None
    return outs if asked is None or _is_of_parts(eqn) else [_required(outs[0], asked)]


def _required(value: Any, spec: Any) -> Any:
    return checkpoint_name(value, f"{CONSTRAINT}{tuple(spec)}")


def _is_of_parts(eqn: Any) -> bool:
    mesh = getattr(eqn.ctx, "cur_abstract_mesh", None)
    return mesh is not None and bool(mesh.manual_axes)


def _structured(eqn: Any, args: list[Any]) -> list[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        branches = [_function(*_compat.open_jaxpr(branch)) for branch in params["branches"]]
        return list(lax.switch(args[0], branches, *args[1:]))
    if name == "while":
        num_test, num_body = params["cond_nconsts"], params["body_nconsts"]
        test, body = (_function(*_compat.open_jaxpr(params[key])) for key in ("cond_jaxpr", "body_jaxpr"))
        for_test, for_body = args[:num_test], args[num_test : num_test + num_body]
        carry = args[num_test + num_body :]
        return list(lax.while_loop(lambda c: test(*for_test, *c)[0], lambda c: body(*for_body, *c), carry))
    inside = _function(*_compat.inner_jaxpr(eqn))
    if name in _compat.REMAT:
        again = jax.checkpoint(inside, policy=params.get("policy"), prevent_cse=params.get("prevent_cse", True))
        return list(again(*args))
    if name == "scan":
        num_consts, num_carry = _compat.scan_sizes(eqn)
        consts, carry = args[:num_consts], args[num_consts : num_consts + num_carry]

        def step(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = inside(*consts, *carry, *xs)
            return outs[:num_carry], outs[num_carry:]

        last, ys = lax.scan(
            step,
            carry,
            args[num_consts + num_carry :],
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*last, *ys]
    return inside(*args)


def _function(jaxpr: Any, consts: Sequence[Any]) -> Callable[..., list[Any]]:
    return lambda *args: run_without_mesh(jaxpr, consts, args)


def _custom(eqn: Any, args: list[Any]) -> list[Any]:
    """A function with a derivative of its own: the function and its rules are rewritten when they are traced."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    functions, params = bound if isinstance(bound, tuple) else (bound["subfuns"], bound)
    operands = [v.aval for v in eqn.invars]
    # Of the function, and of its tangents beside it; what a forward rule returns, a backward rule takes.
    known = [operands, [*operands, *operands]]
    remade = tuple(_remade(function, eqn, known) for function in functions)
    if isinstance(bound, tuple):
        return list(eqn.primitive.bind(*remade, *args, **params))
    return list(eqn.primitive.bind(*args, **{**params, "subfuns": remade}))


def _remade(function: Any, eqn: Any, known: list[list[Any]]) -> Any:
    """A function that traces another as its author did and runs what comes of it on whole arrays.

    Arguments and results that are no arrays (symbolic zeros, flags) go through as they are. Arrays are
    traced at the types that are known for them; the results' types become known.
    """

    def run(*args: Any) -> list[Any]:
        where = [i for i, a in enumerate(args) if _is_array(a)]
        beside: list[tuple[int, Any]] = []

        def arrays_only(*arrays: Any) -> list[Any]:
            given = list(args)
            for i, array in zip(where, arrays, strict=True):
                given[i] = array
            outs = list(function.call_wrapped(*given))
            beside[:] = [(i, out) for i, out in enumerate(outs) if not _is_array(out)]
            return [out for out in outs if _is_array(out)]

        arrays = [args[i] for i in where]
        with _compat.typed_as_in(eqn):
            closed = jax.make_jaxpr(arrays_only)(*_types(arrays, known))
        known.append(list(closed.out_avals))
        outs = run_without_mesh(closed.jaxpr, closed.consts, arrays)
        for i, out in beside:
            outs.insert(i, out)
        return outs

    return linear_util.wrap_init(run, debug_info=function.debug_info)


def _types(arrays: Sequence[Any], known: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """The first known types that have the arrays' shapes and dtypes, else those of whole arrays."""
    wanted = [(jnp.shape(a), a.dtype) for a in arrays]
    for types in known:
        if [(t.shape, t.dtype) for t in types] == wanted:
            return types
    return [jax.ShapeDtypeStruct(*pair) for pair in wanted]


def _shard_map(eqn: Any, args: list[Any]) -> list[Any]:
    """Cut operands into the parts that devices would hold, map the body over them, and join its results."""
    mesh = eqn.params["mesh"]
    in_specs, out_specs = eqn.params["in_specs"], eqn.params["out_specs"]
    used = [a for a in mesh.axis_names if a in eqn.params.get("newly_manual_axes", mesh.axis_names)]
    sizes = {axis: mesh.shape[axis] for axis in used}
    body = _function(*_compat.open_jaxpr(eqn.params["jaxpr"]))
    parts = [_cut(x, _dims(spec, x.ndim), used, sizes) for x, spec in zip(args, in_specs, strict=True)]
    axes_of = [{a for dim in _dims(spec, x.ndim) for a in dim} for x, spec in zip(args, in_specs, strict=True)]
    mapped: Callable[..., list[Any]] = body
    for axis in reversed(used):
        in_axes = tuple(0 if axis in axes else None for axes in axes_of)
        mapped = jax.vmap(mapped, in_axes, 0, axis_name=axis, axis_size=sizes[axis])
    outs = mapped(*parts)
    return [
        _join(out, _dims(spec, var.aval.ndim), used, sizes)
        for out, spec, var in zip(outs, out_specs, eqn.outvars, strict=True)
    ]


def _all_to_all(x: Any, axis: Any, split: int, concat: int) -> Any:
    """The exchange as everyone's parts, of which each takes its own: mapped axes cannot exchange when nested."""
    parts = lax.axis_size(axis)
    apart = x.reshape(*x.shape[:split], parts, x.shape[split] // parts, *x.shape[split + 1 :])
    everyone = lax.all_gather(apart, axis)
    own = lax.dynamic_index_in_dim(everyone, lax.axis_index(axis), split + 1, keepdims=False)
    out = jnp.moveaxis(own, 0, concat)
    return out.reshape(*out.shape[:concat], parts * out.shape[concat + 1], *out.shape[concat + 2 :])


def _dims(spec: Any, rank: int) -> list[tuple[str, ...]]:
    """Per dim the mesh axes it is split over, major first."""
    entries = [*spec, *[None] * (rank - len(spec))]
    return [() if e is None else tuple(e) if isinstance(e, tuple) else (e,) for e in entries]


def _cut(x: Any, dims: Sequence[tuple[str, ...]], used: Sequence[str], sizes: dict[str, int]) -> Any:
    """``(..., n, ...)`` to ``(parts of each axis in order, ..., n / parts, ...)``."""
    shape: list[int] = []
    where: dict[str, int] = {}
    for n, axes in zip(x.shape, dims, strict=True):
        for axis in axes:
            where[axis] = len(shape)
            shape.append(sizes[axis])
            n //= sizes[axis]
        shape.append(n)
    lead = [where[axis] for axis in used if axis in where]
    rest = [i for i in range(len(shape)) if i not in lead]
    return x.reshape(shape).transpose([*lead, *rest])


def _join(x: Any, dims: Sequence[tuple[str, ...]], used: Sequence[str], sizes: dict[str, int]) -> Any:
    """Inverse of :func:`_cut`; an axis that no dim is split over has the same result in every part."""
    kept = [axis for axis in used if any(axis in axes for axes in dims)]
    x = x[tuple(slice(None) if axis in kept else 0 for axis in used)]
    order: list[int] = []
    shape: list[int] = []
    for i, axes in enumerate(dims):
        order += [kept.index(axis) for axis in axes]
        order.append(len(kept) + i)
        shape.append(int(np.prod([sizes[axis] for axis in axes], dtype=int)) * x.shape[len(kept) + i])
    return x.transpose(order).reshape(shape)


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray) and value.dtype != jax.dtypes.float0


def _is_placed(aval: Any) -> bool:
    sharding = getattr(aval, "sharding", None)
    return bool(getattr(getattr(sharding, "mesh", None), "axis_names", ()))


def _bodies(eqn: Any) -> list[Any]:
    params = eqn.params
    if "branches" in params:
        return [_compat.open_jaxpr(b)[0] for b in params["branches"]]
    if "body_jaxpr" in params:
        return [_compat.open_jaxpr(params[key])[0] for key in ("cond_jaxpr", "body_jaxpr")]
    try:
        return [_compat.inner_jaxpr(eqn)[0]]
    except KeyError:
        return []
