"""One training plan as plain Python: the mesh, partition specs, rematerialisation, and a step. Needs jax alone.

    import plan                                     # this file
    mesh = plan.make_mesh()
    params = plan.place(params, mesh)               # any pytree whose paths are named as the plan names them
    opt_state = plan.init_optimizer(optimizer, params, mesh)
    state = jax.device_put(state, plan.replicated(mesh))
    step = plan.make_train_step(loss_fn, optimizer, mesh)
    params, opt_state, state, loss = step(params, opt_state, state, plan.place_batch(batch, mesh))

``loss_fn(params, state, batch) -> (loss, state)``, where ``state`` is what the model changes besides its
parameters (``{}`` where there is nothing) and a loss with a normaliser of its own is ``(sum, weight)``. With
Flax NNX: ``graphdef, params, state = nnx.split(model, nnx.Param, ...)``, and in ``loss_fn``
``nnx.merge(graphdef, params, state)`` and ``nnx.state(model, nnx.Not(nnx.Param))``. The batch is a pytree of
arrays whose first dim is the global batch, and of scalars.

A plan with several stages has a mesh and specs for each (``stage=``), and no step here: what cuts a model into
programs and drives them 1F1B is a runtime, not a plan.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

# What runs where. Specs are written dim by dim; a parameter that is not listed is replicated. Activations
# are named by their equation in the traced loss: "12:0" is the first result of equation 12, "12<0" its first
# operand, "12/3:0" is inside the body of equation 12.
PLAN: dict[str, Any] = {}

AXES = ("dp", "tp")


def make_mesh(stage: int = 0, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh of a stage; ``devices`` are those of the whole allocation, node after node."""
    devices = jax.devices() if devices is None else devices
    part = PLAN["stages"][stage]
    chosen = np.array([devices[i] for i in part["devices"]]).reshape(part["dp"], part["tp"])
    return Mesh(chosen, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def place_batch(batch: Any, mesh: Mesh) -> Any:
    """A global batch as the step takes it: microbatches first, where there are several, and rows over dp."""
    num, rows = PLAN["num_microbatches"], PLAN["global_batch"] // PLAN["num_microbatches"]

    def one(x: Any) -> Any:
        if not np.ndim(x):
            return jax.device_put(x, replicated(mesh))
        lead, spec = ((), PartitionSpec("dp")) if num == 1 else ((num,), PartitionSpec(None, "dp"))
        return jax.device_put(np.reshape(x, (*lead, rows, *np.shape(x)[1:])), NamedSharding(mesh, spec))

    return jax.tree.map(one, batch)


def parameter_spec(name: str, shape: Sequence[int], stage: int = 0) -> PartitionSpec:
    return _fitting(PLAN["stages"][stage]["parameters"].get(name, ()), shape, stage)


def gradient_spec(name: str, shape: Sequence[int], stage: int = 0) -> PartitionSpec:
    """Like the parameter; from ZeRO-2 on also over dp."""
    spec = parameter_spec(name, shape, stage)
    return _over_dp(spec, shape, stage) if PLAN["stages"][stage]["zero"] >= 2 else spec


def optimizer_spec(name: str, shape: Sequence[int], stage: int = 0) -> PartitionSpec:
    """Like the parameter; from ZeRO-1 on also over dp."""
    spec = parameter_spec(name, shape, stage)
    return _over_dp(spec, shape, stage) if PLAN["stages"][stage]["zero"] >= 1 else spec


def place(params: Any, mesh: Mesh, stage: int = 0) -> Any:
    """Parameters where the plan wants them."""
    return jax.device_put(params, _shardings(params, mesh, parameter_spec, stage))


def init_optimizer(optimizer: Any, params: Any, mesh: Mesh, stage: int = 0) -> Any:
    """State of an optax optimizer where the plan wants it."""
    shardings = _optimizer_shardings(jax.eval_shape(optimizer.init, params), params, mesh, stage)
    return jax.jit(optimizer.init, out_shardings=shardings)(params)


def make_train_step(
    loss_fn: Callable[..., Any], optimizer: Any, mesh: Mesh, *, independent_rows: bool = False
) -> Callable[..., Any]:
    """``(params, opt_state, state, batch) -> (params, opt_state, state, loss)``, compiled on its first call.

    The batch comes from :func:`place_batch`; the other arguments are donated. Gradients and losses of the
    microbatches are summed and divided once, so the result is that of the plan's own runtime.

    Args:
        independent_rows: you know that no row of the batch affects what another adds to the loss or to
            ``state``: no batch statistics, no dropout, no expert capacity, a mean over rows or ``(sum, weight)``.
            A convolution is refused, for XLA's partitioner gets some wrong when each part has a kernel of its own.
            With several microbatches each part of dp then sums the gradients of its own rows, and they are
            reduced once a step, which the plan's own runtime does where it finds this to be so.
    """
    if len(PLAN["stages"]) != 1:
        raise ValueError(
            f"a plan of {len(PLAN['stages'])} stages has no step of one program; see the head of this file"
        )
    num_shards = _num_row_shards() if independent_rows else 1
    gradients = _gradients(loss_fn, mesh, num_shards)

    def step(params: Any, opt_state: Any, state: Any, batch: Any) -> Any:
        sums, total, weight, state = _summed(gradients, params, state, batch, mesh, num_shards)
        mean = jax.tree.map(lambda s, p: (s / weight.astype(s.dtype)).astype(p.dtype), sums, params)
        held = _optimizer_shardings(opt_state, params, mesh, 0)
        updates, opt_state = optimizer.update(mean, opt_state, params)
        params = jax.tree.map(lambda p, u: jnp.asarray(p + u).astype(p.dtype), params, updates)
        params = jax.tree.map(_constrain, params, _shardings(params, mesh, parameter_spec, 0))
        return params, jax.tree.map(_constrain, opt_state, held), state, total / weight

    return jax.jit(step, donate_argnums=(0, 1, 2))


def _num_row_shards() -> int:
    """Parts of dp that can sum gradients of their own; 1 where gradients are reduced in every microbatch."""
    part, num_microbatches = PLAN["stages"][0], PLAN["num_microbatches"]
    over_dp = any("dp" in _axes(dim) for spec in part["parameters"].values() for dim in spec)
    rows = PLAN["global_batch"] // num_microbatches
    able = num_microbatches > 1 and part["zero"] < 2 and not over_dp and rows % part["dp"] == 0
    return part["dp"] if able else 1


def _gradients(loss_fn: Callable[..., Any], mesh: Mesh, num_shards: int) -> Callable[..., Any]:
    """``(params, state, rows) -> (gradients, loss sum, weight, state)`` of one microbatch.

    With several shards the parameters have a leading dim of them, and so have gradients, loss sum and weight.
    """
    precision = PLAN["precision"]
    planned = _Planned(loss_fn, mesh, PLAN["stages"][0], inside_dp=num_shards > 1)

    def evaluate(params: Any, state: Any, rows: Any) -> Any:
        loss, after = planned(_cast(params, precision["compute"]), state, _cast(rows, precision["compute"]))
        total, weight = loss if isinstance(loss, tuple) else (loss, 1.0)
        dtype = jnp.promote_types(precision["output"], jnp.result_type(total))
        return jnp.asarray(total, dtype), jnp.asarray(weight, dtype), after

    def shard_by_shard(params: Any, state: Any, rows: Any) -> Any:
        tree: Any
        leaves, tree = jax.tree.flatten(rows)
        at = [0 if jnp.ndim(x) else None for x in leaves]
        parts = [_over_shards(x.reshape(num_shards, -1, *x.shape[1:]), mesh) if jnp.ndim(x) else x for x in leaves]
        # Of state that rows affect there is more than one, which vmap refuses.
        over_dp = jax.vmap(evaluate, (0, None, tree.unflatten(at)), (0, 0, None), spmd_axis_name="dp")
        if "conv_general_dilated" in str(jax.make_jaxpr(over_dp)(params, state, tree.unflatten(parts))):
            raise ValueError("a model with convolutions trains without independent_rows=True")
        return over_dp(params, state, tree.unflatten(parts))

    def of_microbatch(params: Any, state: Any, rows: Any) -> Any:
        def total_of(params: Any) -> Any:
            found = (evaluate if num_shards == 1 else shard_by_shard)(params, state, rows)
            return found[0].sum(), found

        (_, (total, weight, after)), found = jax.value_and_grad(total_of, has_aux=True)(params)
        return found, total, weight, after

    return of_microbatch


def _summed(gradients: Callable[..., Any], params: Any, state: Any, batch: Any, mesh: Mesh, num_shards: int) -> Any:
    """Sums over the microbatches of gradients, loss and weight, and the new state."""
    at = _shardings(params, mesh, gradient_spec, 0)
    whole = at
    if num_shards > 1:
        at = jax.tree.map(lambda s: NamedSharding(mesh, PartitionSpec("dp", *s.spec)), whole)
        params = jax.tree.map(lambda p: _over_shards(jnp.broadcast_to(p, (num_shards, *p.shape)), mesh), params)

    def add(sums: Any, found: Any) -> Any:
        return jax.tree.map(lambda s, g, at: _constrain(s + g.astype(s.dtype), at), sums, found, at)

    accumulation = PLAN["precision"]["accumulation"]
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.promote_types(accumulation, p.dtype)), params)
    sums = jax.tree.map(_constrain, zeros, at)
    if PLAN["num_microbatches"] == 1:
        found, total, weight, state = gradients(params, state, batch)
        return add(sums, found), total, weight, state
    tree: Any
    leaves, tree = jax.tree.flatten(batch)

    def microbatch(rows: Any) -> Any:
        given = iter(rows)
        return tree.unflatten([next(given) if jnp.ndim(x) else x for x in leaves])

    def body(carry: Any, rows: Any) -> Any:
        sums, total, weight, state = carry
        found, more, heavier, state = gradients(params, state, microbatch(rows))
        return (add(sums, found), total + more, weight + heavier, state), None

    rows = [x for x in leaves if jnp.ndim(x)]
    _, total, weight, _ = jax.eval_shape(gradients, params, state, microbatch([x[0] for x in rows]))
    start = (sums, jnp.zeros(total.shape, total.dtype), jnp.zeros(weight.shape, weight.dtype), state)
    (sums, total, weight, state), _ = lax.scan(body, start, rows)
    if num_shards > 1:
        sums = jax.tree.map(lambda s, at: _constrain(s.sum(0), at), sums, whole)
        total, weight = total.sum(), weight.sum()
    return sums, total, weight, state


def _over_shards(value: Any, mesh: Mesh) -> Any:
    """A value whose first dim counts the parts of dp; how the rest of it lies is XLA's choice."""
    spec = PartitionSpec("dp", *(PartitionSpec.UNCONSTRAINED,) * (value.ndim - 1))
    return lax.with_sharding_constraint(value, NamedSharding(mesh, spec))


def _cast(tree: Any, dtype: str | None) -> Any:
    def one(x: Any) -> Any:
        if dtype is None or not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype == jnp.dtype(dtype):
            return x
        return x.astype(dtype)

    return jax.tree.map(one, tree)


def _constrain(value: Any, sharding: NamedSharding) -> Any:
    return lax.with_sharding_constraint(value, sharding) if sharding.mesh.size > 1 else value


# Specs.


def _axes(dim: Any) -> tuple[str, ...]:
    """The mesh axes of one dim of a spec, major first."""
    return (dim,) if isinstance(dim, str) else tuple(dim or ())


def _fitting(spec: Sequence[Any], shape: Sequence[int], stage: int) -> PartitionSpec:
    """The spec, less the axes that do not divide their dim."""
    part = PLAN["stages"][stage]
    dims = []
    for dim, axes in zip(shape, [*spec, *[None] * len(shape)], strict=False):
        names = _axes(axes)
        size = int(np.prod([part[name] for name in names])) if names else 1
        dims.append((axes if isinstance(axes, str) else names) if size > 1 and dim % size == 0 else None)
    return PartitionSpec(*dims)


def _over_dp(spec: PartitionSpec, shape: Sequence[int], stage: int) -> PartitionSpec:
    """Also over dp: the largest dim that is whole and that dp divides."""
    dp = PLAN["stages"][stage]["dp"]
    used = {axis for dim in spec for axis in _axes(dim)}
    dims = [*spec, *[None] * (len(shape) - len(spec))]
    free = [i for i, dim in enumerate(dims) if dim is None and shape[i] % dp == 0 and shape[i] >= dp]
    if dp == 1 or "dp" in used or not free:
        return spec
    dims[max(free, key=lambda i: shape[i])] = "dp"
    return PartitionSpec(*dims)


def _name(path: tuple[Any, ...]) -> str:
    """``blocks/0/mlp/kernel`` for a key path; the trailing ``value`` of Flax NNX is dropped."""
    parts = [str(next((getattr(k, a) for a in ("key", "idx", "name") if hasattr(k, a)), k)) for k in path]
    return "/".join(parts[:-1] if len(parts) > 1 and parts[-1] == "value" else parts)


def _shardings(params: Any, mesh: Mesh, spec_of: Callable[..., PartitionSpec], stage: int) -> Any:
    def one(path: Any, x: Any) -> NamedSharding:
        return NamedSharding(mesh, spec_of(_name(path), x.shape, stage))

    return jax.tree_util.tree_map_with_path(one, params)


def _optimizer_shardings(opt_state: Any, params: Any, mesh: Mesh, stage: int) -> Any:
    """A leaf that ends in a parameter's path and has its shape lies as the plan says; others are replicated."""
    shapes = {_name(path): x.shape for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}

    def one(path: Any, x: Any) -> NamedSharding:
        parts = _name(path).split("/")
        tails = ["/".join(parts[i:]) for i in range(len(parts))]
        name = next((tail for tail in tails if shapes.get(tail) == x.shape), None)
        return NamedSharding(mesh, PartitionSpec() if name is None else optimizer_spec(name, x.shape, stage))

    return jax.tree_util.tree_map_with_path(one, opt_state)


# The loss, equation by equation, with its activations where the plan wants them.

_CALLS = {"jit", "pjit", "closed_call", "core_call", "core_closed_call", "xla_call"}
_REMAT = {"remat2", "checkpoint", "remat"}


class _Planned:
    """A function whose named values are constrained, and whose layers are recomputed where the plan says so."""

    def __init__(
        self, function: Callable[..., Any], mesh: Mesh, part: dict[str, Any], *, inside_dp: bool = False
    ) -> None:
        self.function, self.mesh = function, mesh
        self.remat = part["remat"]
        self.num_layers = part["layers"][1] - part["layers"][0] + 1
        self.specs = part["activations"] if mesh.size > 1 else {}
        if inside_dp:  # what is left of a spec for one part of dp
            left = {key: [[a for a in _axes(dim) if a != "dp"] for dim in spec] for key, spec in self.specs.items()}
            self.specs = {key: [dim or None for dim in spec] for key, spec in left.items()}
        self.prefixes = set()
        for key in self.specs:
            prefix = re.split("[:<]", key)[0]
            while "/" in prefix:
                prefix = prefix.rpartition("/")[0]
                self.prefixes.add(prefix)

    def __call__(self, *args: Any) -> Any:
        leaves: list[Any]
        tree: Any
        leaves, tree = jax.tree.flatten(args)
        # Traced without shardings, which would add equations; calls are inlined, so that each has a number.
        plain = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]

        def function(*values: Any) -> Any:
            return self.function(*tree.unflatten(values))

        closed, shape = jax.make_jaxpr(function, return_shape=True)(*plain)
        flat = jax.make_jaxpr(lambda *x: _inline(closed.jaxpr, closed.consts, x))(*plain)
        self.seen: set[str] = set()
        env = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
        env |= dict(zip(flat.jaxpr.invars, leaves, strict=True))
        self._layers([(str(i), eqn) for i, eqn in enumerate(flat.jaxpr.eqns)], env, flat.jaxpr.outvars)
        missing = set(self.specs) - self.seen
        if missing:
            raise ValueError(f"this loss is not the one that was planned: it has no value {sorted(missing)[0]}")
        return jax.tree.unflatten(jax.tree.structure(shape), [_read(a, env) for a in flat.jaxpr.outvars])

    def _layers(self, equations: list[Any], env: dict[Any, Any], outvars: Sequence[Any]) -> None:
        if not self.remat:
            self._run(equations, env)
            return
        wanted = {a for a in outvars if not isinstance(a, Literal)}
        runs = _cut(equations, self.num_layers, wanted)
        later = []
        for run in reversed(runs):
            later.append(set(wanted))
            wanted |= {a for _, e in run for a in e.invars if not isinstance(a, Literal)}
        for run, used in zip(runs, reversed(later), strict=True):
            made = dict.fromkeys(v for _, e in run for v in e.outvars)
            ins = [
                a
                for a in dict.fromkeys(a for _, e in run for a in e.invars if not isinstance(a, Literal))
                if a not in made
            ]
            outs = [v for v in made if v in used]

            def layer(values: list[Any], run: Any = run, ins: Any = ins, outs: Any = outs) -> list[Any]:
                inner = dict(zip(ins, values, strict=True))
                self._run(run, inner)
                return [inner[v] for v in outs]

            env.update(zip(outs, jax.checkpoint(layer)([env[v] for v in ins]), strict=True))

    def _run(self, equations: Sequence[Any], env: dict[Any, Any]) -> None:
        for key, eqn in equations:
            args = [self._placed(f"{key}<{i}", _read(a, env)) for i, a in enumerate(eqn.invars)]
            values = self._equation(key, eqn, args)
            for i, (var, value) in enumerate(zip(eqn.outvars, values, strict=True)):
                env[var] = self._placed(f"{key}:{i}", value)

    def _placed(self, key: str, value: Any) -> Any:
        spec = self.specs.get(key)
        if spec is None:
            return value
        self.seen.add(key)
        if len(spec) > value.ndim:
            raise ValueError(
                f"this loss is not the one that was planned: value {key} has {value.ndim} dims, not {spec}"
            )
        # Chosen at the size of the global batch, an axis may not divide a microbatch's dim.
        return lax.with_sharding_constraint(value, NamedSharding(self.mesh, _fitting(spec, value.shape, 0)))

    def _body(self, prefix: str, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
        self._run([(f"{prefix}/{i}", eqn) for i, eqn in enumerate(jaxpr.eqns)], env)
        return [_read(a, env) for a in jaxpr.outvars]

    def _equation(self, key: str, eqn: Any, args: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        recompute = self.remat and name == "scan" and "/" not in key
        if key not in self.prefixes and not recompute:
            return _bind(eqn, args)
        if name == "scan":
            return self._scan(key, eqn, args, recompute)
        if name in _CALLS:
            return self._body(key, *_inner(eqn), args)
        if name in _REMAT:
            jaxpr, consts = _inner(eqn)
            again = jax.checkpoint(
                lambda *a: self._body(key, jaxpr, consts, a),
                policy=eqn.params.get("policy"),
                prevent_cse=eqn.params.get("prevent_cse", True),
            )
            return list(again(*args))
        # What has a derivative rule of its own is kept whole, for inlining it would lose the rule.
        self.seen |= {inside for inside in self.specs if inside.startswith(f"{key}/")}
        return _bind(eqn, args)

    def _scan(self, key: str, eqn: Any, args: list[Any], recompute: bool) -> list[Any]:
        jaxpr, body_consts = _inner(eqn)
        if "num_consts" in eqn.params:
            num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        else:  # jax >= 0.11
            num_consts, num_carry = (len(group) for group in eqn.params["ft_in"].unpack()[:2])
        consts, carry, xs = args[:num_consts], args[num_consts : num_consts + num_carry], args[num_consts + num_carry :]

        def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            outs = self._body(key, jaxpr, body_consts, [*consts, *carry, *x])
            return outs[:num_carry], outs[num_carry:]

        final, ys = lax.scan(
            jax.checkpoint(body, prevent_cse=False) if recompute else body,
            carry,
            xs,
            length=eqn.params["length"],
            reverse=eqn.params["reverse"],
            unroll=eqn.params["unroll"],
        )
        return [*final, *ys]


def _cut(equations: list[Any], count: int, outputs: set[Any]) -> list[list[Any]]:
    """Runs of about equal work, cut where the fewest bytes cross."""
    last = {a: i for i, (_, e) in enumerate(equations) for a in e.invars if not isinstance(a, Literal)}
    work, live, before = [0.0], [0.0], 0.0
    dying: dict[int, float] = {}
    for i, (_, eqn) in enumerate(equations):
        work.append(work[-1] + _flops(eqn))
        for var in eqn.outvars:
            end = len(equations) if var in outputs else last.get(var, i)
            if end > i:
                before += _size(var)
                dying[end] = dying.get(end, 0.0) + _size(var)
        before -= dying.get(i, 0.0)
        live.append(before)
    cuts = []
    for k in range(1, count):
        low, high = (k - 0.5) * work[-1] / count, (k + 0.5) * work[-1] / count
        near = [i for i in range(1, len(equations)) if low <= work[i] <= high]
        cuts += [min(near, key=lambda i: live[i])] if near else []
    ends = [0, *sorted(set(cuts)), len(equations)]
    return [equations[a:b] for a, b in itertools.pairwise(ends) if b > a]


def _size(var: Any) -> float:
    return float(np.prod(getattr(var.aval, "shape", ()), dtype=float))


def _flops(eqn: Any) -> float:
    total = sum(_size(v) for v in eqn.outvars)
    if eqn.primitive.name == "dot_general":
        (contract, _), _ = eqn.params["dimension_numbers"]
        return 2 * total * float(np.prod([eqn.invars[0].aval.shape[d] for d in contract], dtype=float))
    if eqn.primitive.name == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        return 2 * total * float(np.prod([eqn.invars[1].aval.shape[d] for d in numbers.rhs_spec[1:]], dtype=float))
    try:
        jaxpr, _ = _inner(eqn)
    except KeyError:
        return total
    return eqn.params.get("length", 1) * sum(_flops(e) for e in jaxpr.eqns)


def _inner(eqn: Any) -> tuple[Any, list[Any]]:
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            body = eqn.params[name]
            return (body.jaxpr, list(body.consts)) if hasattr(body, "consts") and hasattr(body, "jaxpr") else (body, [])
    raise KeyError(eqn.primitive.name)


def _inline(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        values = [_read(a, env) for a in eqn.invars]
        outs = _inline(*_inner(eqn), values) if eqn.primitive.name in _CALLS else _bind(eqn, values)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [_read(a, env) for a in jaxpr.outvars]


def _read(atom: Any, env: dict[Any, Any]) -> Any:
    return atom.val if isinstance(atom, Literal) else env[atom]


def _bind(eqn: Any, args: list[Any]) -> list[Any]:
    bound = eqn.primitive.get_bind_params(eqn.params)
    with eqn.ctx.manager:
        if isinstance(bound, tuple):  # jax < 0.11
            out = eqn.primitive.bind(*bound[0], *args, **bound[1])
        else:
            out = eqn.primitive.bind(*args, **bound)
    return list(out) if eqn.primitive.multiple_results else [out]
