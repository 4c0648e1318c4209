"""Stand-ins for tests of the loop: a program that is one plain ``jax.jit``, and small loaders.

The program keeps the contract of the real one (donates its state, returns metrics unfetched, saves
under plan-independent names) for a small NNX model, data parallel over the first devices.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from arena_jax.compiler.problem import path_name
from arena_jax.grid import Allocation, Estimate, GridShape, IndexRow, Plan, PlanIndex, StagePlan, Submesh
from arena_jax.planner import Candidate, choose
from arena_jax.runtime.contract import Compiled
from arena_jax.runtime.move import Moved

BATCH = 8
WIDTH = 6


class Toy(nnx.Module):
    """Two linear layers and a tanh, ``WIDTH`` numbers in and out."""

    def __init__(self, rngs: nnx.Rngs, hidden: int = 16) -> None:
        self.up = nnx.Linear(WIDTH, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jnp.tanh(self.up(x)))


def toy_loss(model: Toy, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Mean squared error."""
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def one_stage_plan(num_devices: int = 1, *, fingerprint: str = "toy") -> Plan:
    """A data-parallel plan of one stage."""
    grid = GridShape.parse(f"cpu:{num_devices}")
    stage = StagePlan(layers=(0, 0), submesh=Submesh(1, num_devices), dp=num_devices, tp=1)
    return Plan(model_fingerprint=fingerprint, global_batch=BATCH, grid=grid, num_microbatches=1, stages=(stage,))


class JitProgram:
    """One ``jax.jit`` of the whole step."""

    def __init__(
        self,
        plan: Plan,
        *,
        hidden: int = 16,
        nonfinite: str = "stop",
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        self.plan = plan
        self.rows = None
        self.num_steps_run = 0
        self._hidden = hidden
        mesh = Mesh(np.array(jax.devices()[: plan.grid.num_devices]), ("dp",), axis_types=(AxisType.Auto,))
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._rows = NamedSharding(mesh, PartitionSpec("dp"))
        self._optimizer = optimizer or optax.adam(1e-2)
        abstract = nnx.eval_shape(lambda: Toy(nnx.Rngs(0), hidden))
        self._graph, self._abstract = nnx.split(abstract)

        def loss_of(params: Any, batch: Any) -> jax.Array:
            return toy_loss(nnx.merge(self._graph, params), batch)

        @partial(jax.jit, donate_argnums=0, out_shardings=(self._replicated, self._replicated))
        def step(state: Any, batch: Any) -> Any:
            params, moments = state
            loss, gradient = jax.value_and_grad(loss_of)(params, batch)
            updates, new_moments = self._optimizer.update(gradient, moments, params)
            new = (optax.apply_updates(params, updates), new_moments)
            if nonfinite == "skip":
                new = jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(loss), a, b), new, state)
            return new, {"loss": loss, "grad_norm": optax.tree.norm(gradient)}

        self._step = step
        self._eval = jax.jit(lambda state, batch: {"loss": loss_of(state[0], batch)})

    def init(self, seed: int) -> Any:
        """Fresh parameters and moments."""

        @partial(jax.jit, out_shardings=self._replicated)
        def make() -> Any:
            params = nnx.split(Toy(nnx.Rngs(seed), self._hidden))[1]
            return params, self._optimizer.init(params)

        return make()

    def step(self, state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        """One update; ``state`` is donated."""
        self.num_steps_run += 1
        batch = {k: jax.device_put(v, self._rows) for k, v in batch.items()}
        return self._step(state, batch)

    def eval_values(self, state: Any, batch: Any) -> dict[str, jax.Array]:
        """The loss alone."""
        return self._eval(state, batch)

    def _names(self, state: Any) -> list[str]:
        paths = jax.tree_util.tree_flatten_with_path(state)[0]
        groups = ("params", "opt")
        return [f"{groups[path[0].idx]}/{path_name(path[1:])}" for path, _ in paths]

    def save_tree(self, state: Any) -> dict[str, jax.Array]:
        """Leaves by name."""
        return dict(zip(self._names(state), jax.tree.leaves(state), strict=True))

    def abstract_tree(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes by name, replicated."""
        state = (self._abstract, jax.eval_shape(self._optimizer.init, self._abstract))
        leaves = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=self._replicated) for leaf in jax.tree.leaves(state)
        ]
        return dict(zip(self._names(state), leaves, strict=True))

    def load_tree(self, tree: Mapping[str, Any]) -> Any:
        """The state on this program's devices."""
        state = (self._abstract, jax.eval_shape(self._optimizer.init, self._abstract))
        leaves = [jax.device_put(tree[name], self._replicated) for name in self._names(state)]
        # A copy: `device_put` may hand back the caller's own buffers, which the next step would donate.
        return jax.tree.unflatten(jax.tree.structure(state), [jnp.copy(leaf) for leaf in leaves])

    def warm_up(self) -> None:
        """Nothing to set up."""

    def plan_move(self, other: "JitProgram") -> None:
        """Nothing to plan."""

    def take_from(self, state: Any, other: "JitProgram") -> tuple[Any, Moved]:
        """Through whole leaves."""
        return self.load_tree(other.save_tree(state)), Moved(
            seconds=1e-6, written_bytes=1, kept_bytes=0, parked_bytes=0, peak_bytes={}
        )


class ToyLoader:
    """Endless batches that depend on (seed, number of the batch); keeps the numbers it gave out."""

    fingerprint = "toy-data"

    def __init__(self, seed: int = 0, *, bad_at: int | None = None, num_batches: int | None = None) -> None:
        self._seed = seed
        self._bad_at = bad_at
        self._num_batches = num_batches
        self.position = 0
        self.given: list[int] = []

    def __iter__(self) -> "ToyLoader":
        return self

    def __next__(self) -> dict[str, np.ndarray]:
        if self._num_batches is not None and self.position >= self._num_batches:
            raise StopIteration
        self.given.append(self.position)
        rng = np.random.default_rng((self._seed, self.position))
        self.position += 1
        x = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        if self.position == self._bad_at:
            x[0, 0] = np.nan
        return {"x": x, "y": np.roll(x, 1, axis=1)}

    def get_state(self) -> dict[str, int]:
        """The number of the next batch."""
        return {"position": self.position}

    def set_state(self, state: Mapping[str, int]) -> None:
        """Continue there."""
        self.position = state["position"]


class ToyPlans:
    """Plans one data-parallel stage for any allocation that divides the batch."""

    def __init__(self, *, hidden: int = 16, nonfinite: str = "stop") -> None:
        self._hidden = hidden
        self._nonfinite = nonfinite
        self.num_compiled = 0

    def search(self, target: GridShape | Allocation) -> PlanIndex:
        """One row, feasible or not."""
        grid = target if isinstance(target, GridShape) else GridShape(target, 1)
        if BATCH % grid.num_devices:
            reason = f"a batch of {BATCH} does not divide over {grid.num_devices} devices"
            return PlanIndex([IndexRow(grid=grid, num_microbatches=1, plan=None, estimate=None, reason=reason)])
        estimate = Estimate(step_time_s=0.1, memory_bytes=1, device_memory_bytes=2, stages=(), flops=1.0)
        plan = one_stage_plan(grid.num_devices)
        return PlanIndex([IndexRow(grid=grid, num_microbatches=1, plan=plan, estimate=estimate)])

    def settle(self, num_microbatches: int) -> None:
        """There is only one number here."""
        assert num_microbatches == 1

    def given(self, plan: Plan) -> Candidate:
        """As the real one."""
        return Candidate(plan=plan, engine="given")

    def compile(self, candidate: Candidate, device_numbers: Sequence[int] | None = None) -> Compiled:
        """The jit program."""
        self.num_compiled += 1
        return Compiled(
            program=JitProgram(candidate.plan, hidden=self._hidden, nonfinite=self._nonfinite),
            estimated_step_time_s=candidate.estimated_step_time_s,
            engine=candidate.engine,
        )

    def recompile(self, target: GridShape | Allocation, device_numbers: Sequence[int] | None = None) -> Compiled:
        """As the real one."""
        return self.compile(choose(self.search(target), target), device_numbers)
