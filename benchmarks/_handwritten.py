"""Training steps as one would write them by hand for one GPT and one layout, in plain jax, flax and optax.

Each is a class whose ``step(batch)`` dispatches one optimizer step on a numpy batch and returns the
loss, and whose ``state`` holds everything to wait for. They donate what can be donated and use nothing
of ``arena_jax``. The optimizer is AdamW behind clipping by the global norm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from models.gpt import GPT, Config, loss_fn
from models.transformer import add_positions, cross_entropy, embed

Batch = Mapping[str, np.ndarray]

CLIP_NORM = 1.0
_adamw = partial(optax.adamw, 1e-3, weight_decay=0.1)


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(CLIP_NORM), _adamw())


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every step trains: a model, a batch size, a number of microbatches."""

    config: Config
    global_batch: int
    num_microbatches: int = 1
    seed: int = 0

    def model(self) -> GPT:
        return GPT(self.config, rngs=nnx.Rngs(self.seed))

    def batch(self, seed: int) -> Batch:
        shape = (self.global_batch, self.config.sequence_length)
        tokens = np.random.default_rng(seed).integers(0, self.config.vocabulary, shape, np.int32)
        return {"tokens": tokens, "targets": np.roll(tokens, -1, axis=1)}


class Jitted:
    """One ``jax.jit`` over a mesh, microbatches by ``lax.scan``.

    Args:
        specs: partition spec of each parameter by path; what is not named is replicated.
    """

    def __init__(self, task: Task, mesh: Mesh, specs: Mapping[str, P]) -> None:
        graphdef, params = nnx.split(task.model())
        transformation, count = optimizer(), task.num_microbatches

        def sharding(path: Any, leaf: Any) -> NamedSharding:
            return NamedSharding(mesh, specs.get(_name(path), P()))

        params = jax.device_put(params, jax.tree_util.tree_map_with_path(sharding, params))
        state = _place_like(transformation.init(params), params, NamedSharding(mesh, P()))
        self.state = params, state
        rows = P("dp") if count == 1 else P(None, "dp")
        self._count, self._rows = count, NamedSharding(mesh, rows)

        def gradient(params: Any, batch: Any) -> Any:
            return jax.value_and_grad(lambda p: loss_fn(nnx.merge(graphdef, p), batch))(params)

        def accumulated(params: Any, batch: Any) -> Any:
            def body(total: Any, rows: Any) -> Any:
                return jax.tree.map(jnp.add, total, gradient(params, rows)), None

            zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
            total, _ = lax.scan(body, zeros, batch)
            return jax.tree.map(lambda x: x / count, total)

        @partial(
            jax.jit,
            donate_argnums=(0, 1),
            out_shardings=(*(jax.tree.map(lambda x: x.sharding, x) for x in self.state), NamedSharding(mesh, P())),
        )
        def step(params: Any, state: Any, batch: Any) -> Any:
            loss, gradients = (gradient if count == 1 else accumulated)(params, batch)
            updates, state = transformation.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        self._step = step

    @property
    def num_programs(self) -> int:
        """Programs issued per step."""
        return 1

    def place(self, batch: Batch) -> Any:
        if self._count > 1:
            batch = {name: x.reshape(self._count, -1, *x.shape[1:]) for name, x in batch.items()}
        return jax.device_put(batch, self._rows)

    def step(self, batch: Batch) -> jax.Array:
        params, state, loss = self._step(*self.state, self.place(batch))
        self.state = params, state
        return loss


# The GPT in the pieces that pipelines need: parameters as nested states, blocks as a pure function.


@dataclass(frozen=True)
class Pieces:
    """A GPT's parameters taken apart, and what applies a block."""

    block: Callable[[Any, jax.Array], jax.Array]
    embedding: dict[str, jax.Array]
    blocks: list[Any]
    head: dict[str, Any]
    norm: Callable[[Any, jax.Array], jax.Array]


def take_apart(task: Task) -> Pieces:
    config = task.config
    if config.tie_embeddings or config.scan_layers or config.dropout:
        raise ValueError("the pieces are of a plain GPT: untied, unrolled, without dropout")
    model = task.model()
    split = [nnx.split(block) for block in model.blocks.blocks]
    norm_def, norm = nnx.split(model.norm)
    block_def = split[0][0]
    return Pieces(
        block=lambda params, x: nnx.merge(block_def, params)(x),
        embedding={"embedding": model.embedding[...], "positions": model.positions[...]},
        blocks=[params for _, params in split],
        head={"norm": norm, "head": model.head[...]},
        norm=lambda params, x: nnx.merge(norm_def, params)(x),
    )


def _embed(params: Any, tokens: jax.Array) -> jax.Array:
    return add_positions(embed(nnx.Param(params["embedding"]), tokens, None), nnx.Param(params["positions"]))


def _loss(pieces: Pieces, params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
    return cross_entropy(pieces.norm(params["norm"], x) @ params["head"], targets).mean()


class OneFOneB:
    """Two stages on two devices, 1F1B, by bare ``jit`` and ``device_put``.

    The closure of ``jax.vjp`` leaves the forward program as a pytree and is the backward's argument.
    The last stage runs forward and backward in one program.
    """

    def __init__(self, task: Task, devices: list[jax.Device]) -> None:
        pieces = take_apart(task)
        half = len(pieces.blocks) // 2
        count = task.num_microbatches
        places = [SingleDeviceSharding(d) for d in devices[:2]]
        params = [
            {"embedding": pieces.embedding, "blocks": pieces.blocks[:half]},
            {"blocks": pieces.blocks[half:], "head": pieces.head},
        ]
        transformation = _adamw()
        params = [jax.device_put(p, place) for p, place in zip(params, places, strict=True)]
        # Copied, for device_put may alias an array that is there already, and steps donate.
        params = [jax.tree.map(jnp.copy, p) for p in params]
        self.state = [
            (p, jax.device_put(transformation.init(p), place)) for p, place in zip(params, places, strict=True)
        ]
        self._places, self._count = places, count

        def first(params: Any, tokens: jax.Array) -> jax.Array:
            x = _embed(params["embedding"], tokens)
            for block in params["blocks"]:
                x = pieces.block(block, x)
            return x

        def second(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
            for block in params["blocks"]:
                x = pieces.block(block, x)
            return _loss(pieces, params["head"], x, targets)

        @jax.jit
        def forward(params: Any, tokens: jax.Array) -> Any:
            return jax.vjp(lambda p: first(p, tokens), params)

        @partial(jax.jit, donate_argnums=2)
        def backward(pull_back: Any, cotangent: jax.Array, total: Any) -> Any:
            (gradient,) = pull_back(cotangent)
            return jax.tree.map(jnp.add, total, gradient)

        @partial(jax.jit, donate_argnums=(3, 4))
        def last(params: Any, x: jax.Array, targets: jax.Array, loss: jax.Array, total: Any) -> Any:
            value, (gradient, cotangent) = jax.value_and_grad(second, argnums=(0, 1))(params, x, targets)
            return loss + value, jax.tree.map(jnp.add, total, gradient), cotangent

        @jax.jit
        def zeros(params: Any) -> Any:
            return jax.tree.map(jnp.zeros_like, params), jnp.zeros(())

        @jax.jit
        def square_norm(gradient: Any) -> jax.Array:
            return sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)) / count**2

        @partial(jax.jit, donate_argnums=(0, 1))
        def update(params: Any, state: Any, gradient: Any, own: jax.Array, other: jax.Array) -> Any:
            norm = jnp.sqrt(own + other)
            scale = jnp.where(norm < CLIP_NORM, 1.0, CLIP_NORM / norm) / count
            gradient = jax.tree.map(lambda g: g * scale, gradient)
            updates, state = transformation.update(gradient, state, params)
            return optax.apply_updates(params, updates), state

        self._forward, self._backward, self._last = forward, backward, last
        self._zeros, self._square_norm, self._update = zeros, square_norm, update
        self._mean = jax.jit(lambda total: total / count)

    @property
    def num_programs(self) -> int:
        """Programs issued per step: stage programs, start, norm and update of two stages, mean of the loss."""
        return 3 * self._count + 7

    def step(self, batch: Batch) -> jax.Array:
        (p0, s0), (p1, s1) = self.state
        here, there = self._places
        tokens = jax.device_put(np.split(batch["tokens"], self._count), here)
        targets = jax.device_put(np.split(batch["targets"], self._count), there)
        (total0, _), (total1, loss) = self._zeros(p0), self._zeros(p1)
        waiting: list[Any] = []
        received: list[Any] = []

        def run_forward(m: int) -> None:
            x, pull_back = self._forward(p0, tokens[m])
            waiting.append(pull_back)
            received.append(jax.device_put(x, there))

        for m in range(min(2, self._count)):
            run_forward(m)
        for m in range(self._count):
            loss, total1, cotangent = self._last(p1, received.pop(0), targets[m], loss, total1)
            total0 = self._backward(waiting.pop(0), jax.device_put(cotangent, here), total0)
            if m + 2 < self._count:
                run_forward(m + 2)
        square0, square1 = self._square_norm(total0), self._square_norm(total1)
        self.state = [
            self._update(p0, s0, total0, square0, jax.device_put(square1, here)),
            self._update(p1, s1, total1, square1, jax.device_put(square0, there)),
        ]
        return self._mean(loss)


class Permuted:
    """Two stages as one program: ``shard_map`` over the stages, ``ppermute`` between them, GPipe's schedule.

    Embedding and head are outside the pipeline, the head's rows spread over the devices.

    Args:
        remat: recompute each tick's blocks in the backward pass.
        unroll: write the ticks out rather than loop over them.
        skip: run no blocks where the pipeline fills and drains. On devices of their own that saves
            nothing, as the others must be waited for; devices that share cores it spares work.
    """

    def __init__(self, task: Task, devices: list[jax.Device], *, remat: bool, unroll: bool, skip: bool) -> None:
        pieces = take_apart(task)
        num_stages, count = 2, task.num_microbatches
        per_stage = len(pieces.blocks) // num_stages
        mesh = Mesh(np.array(devices[:num_stages]), ("stage",))
        whole, by_stage = NamedSharding(mesh, P()), NamedSharding(mesh, P("stage"))
        rows = NamedSharding(mesh, P(None, "stage"))
        # The k-th block of every stage, stacked over the stages.
        stacked = [jax.tree.map(lambda *x: jnp.stack(x), *pieces.blocks[k::per_stage]) for k in range(per_stage)]
        params = {"embedding": pieces.embedding, "blocks": stacked, "head": pieces.head}
        shardings = {
            name: jax.tree.map(lambda _, s=by_stage if name == "blocks" else whole: s, tree)
            for name, tree in params.items()
        }
        params = jax.tree.map(jnp.copy, jax.device_put(params, shardings))
        transformation = optimizer()
        state = _place_like(transformation.init(params), params, whole)
        self.state = params, state
        self._count, self._rows = count, rows

        def apply(blocks: list[Any], x: jax.Array) -> jax.Array:
            for block in blocks:
                x = pieces.block(block, x)
            return x

        run_blocks = jax.checkpoint(apply, prevent_cse=unroll) if remat else apply

        @partial(jax.shard_map, mesh=mesh, in_specs=(P("stage"), P()), out_specs=P("stage"), check_vma=False)
        def pipeline(blocks: list[Any], inputs: jax.Array) -> jax.Array:
            stage = lax.axis_index("stage")
            blocks = jax.tree.map(lambda leaf: leaf[0], blocks)

            def tick(arrived: jax.Array, t: jax.Array) -> Any:
                fresh = lax.dynamic_index_in_dim(inputs, jnp.minimum(t, count - 1), keepdims=False)
                x = jnp.where(stage == 0, fresh, arrived)
                if skip:
                    busy = (t >= stage) & (t - stage < count)
                    out = lax.cond(busy, run_blocks, lambda _, x: x, blocks, x)
                else:
                    out = run_blocks(blocks, x)
                return lax.ppermute(out, "stage", [(i, i + 1) for i in range(num_stages - 1)]), out

            ticks = jnp.arange(count + num_stages - 1)
            _, outs = lax.scan(tick, jnp.zeros_like(inputs[0]), ticks, unroll=len(ticks) if unroll else 1)
            return outs[num_stages - 1 :][None]

        def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
            x = lax.with_sharding_constraint(_embed_all(params["embedding"], tokens), whole)
            x = pipeline(params["blocks"], x)[-1]
            return _loss(pieces, params["head"], lax.with_sharding_constraint(x, rows), targets)

        @partial(
            jax.jit,
            donate_argnums=(0, 1),
            out_shardings=(*(jax.tree.map(lambda x: x.sharding, x) for x in self.state), whole),
        )
        def step(params: Any, state: Any, tokens: jax.Array, targets: jax.Array) -> Any:
            value, gradient = jax.value_and_grad(loss)(params, tokens, targets)
            updates, state = transformation.update(gradient, state, params)
            return optax.apply_updates(params, updates), state, value

        self._step = step

    def step(self, batch: Batch) -> jax.Array:
        shaped = [batch[n].reshape(self._count, -1, *batch[n].shape[1:]) for n in ("tokens", "targets")]
        params, state, loss = self._step(*self.state, *jax.device_put(shaped, self._rows))
        self.state = params, state
        return loss


def _embed_all(params: Any, tokens: jax.Array) -> jax.Array:
    """(M, B, S) tokens -> (M, B, S, D)."""
    return params["embedding"][tokens] + params["positions"][: tokens.shape[-1]]


def _place_like(state: Any, params: Any, replicated: NamedSharding) -> Any:
    """Optimizer state laid out like the parameters; the path of a moment ends in its parameter's."""
    shardings = {_name(path): x.sharding for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}

    def sharding(path: Any, _: Any) -> Any:
        name = _name(path)
        return next((s for n, s in shardings.items() if name.endswith(f"/{n}")), replicated)

    return jax.device_put(state, jax.tree_util.tree_map_with_path(sharding, state))


def _name(path: tuple[Any, ...]) -> str:
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    return "/".join(parts[:-1] if parts[-1] == "value" else parts)
