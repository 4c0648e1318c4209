"""A compiled plan: initialise, step, evaluate, save, load."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from arena_jax.compiler.model_tree import ParameterTree
from arena_jax.compiler.problem import FROZEN, PARAMS, STATE, Problem
from arena_jax.grid import Plan
from arena_jax.runtime.engine import Engine, Metrics, finished, flatten_batch
from arena_jax.runtime.evaluate import Evaluator
from arena_jax.runtime.layout import (
    Entry,
    Layout,
    State,
    Tree,
    abstract_tree,
    from_tree,
    join_gradients,
    leaf_names,
    own,
    to_tree,
    unflatten,
)
from arena_jax.runtime.links import Links, LocalLinks
from arena_jax.runtime.move import Move, Moved

# Drawing parameters is a large program that runs once: compiling it well takes LLVM ten times as long.
_COMPILE_QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


# What a state may take, all devices together and counted generously, for a step to be tried on zeros.
_WARM_UP_BYTES = 1 << 29


class Program:
    """A plan compiled for one problem on concrete devices. Made by :func:`compile_program`.

    ``step`` consumes the state it is given and returns a new one; nothing else is ever donated.
    """

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        layout: Layout,
        engine: Engine,
        evaluator: Evaluator,
        links: Links | None = None,
    ) -> None:
        self._links: Links = links or LocalLinks()
        self.problem = problem
        self.plan = plan
        self._layout = layout
        self._engine = engine
        self._evaluator = evaluator
        self._move: tuple[Program, Move] | None = None

    @property
    def num_parameters(self) -> int:
        return self.problem.num_parameters

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def rows(self) -> np.ndarray | None:
        """Numbers of the rows that this process gives to :meth:`step`; ``None`` for the whole global batch."""
        return self._engine.rows

    def init(self, rngs: nnx.Rngs | int | None = None) -> State:
        """A new state, made sharded; bit-equal for every plan.

        Args:
            rngs: seed or ``nnx.Rngs`` for a model factory, default the problem's seed. A model that
                was passed as a module keeps its values.
        """
        if rngs is None or isinstance(rngs, int):
            rngs = nnx.Rngs(self.problem.seed if rngs is None else rngs)
        return _initialise(self.problem, self._layout, rngs, self._links)

    def step(self, state: State, batch: Any) -> tuple[State, Metrics]:
        """One optimizer step on a global batch. Asynchronous: metrics are arrays not yet computed.

        Args:
            batch: the global batch, or this process's :attr:`rows` of it where several processes take part.

        Returns:
            The new state, and ``{"loss": ..., **metrics}`` as scalar arrays.
        """
        return self._engine.step(state, self._flatten(batch))

    def eval_step(self, state: State, batch: Any) -> Metrics:
        """Loss and metrics of the model in ``.eval()`` mode, on any number of rows; changes no state."""
        return {name: finished(value) for name, value in self.eval_values(state, batch).items()}

    def eval_values(self, state: State, batch: Any) -> Metrics:
        """As :meth:`eval_step`, but ``Weighted``, ``Sum`` and ``Last`` as such, to be combined over batches."""
        arrays, rows = flatten_batch(self.problem, batch, ragged=True)
        return self._evaluator(state, arrays, rows)

    def grad_step(self, state: State, batch: Any) -> tuple[dict[str, Any], Metrics]:
        """Gradients of the mean loss without an update, for loops with an optimizer of their own.

        Returns:
            ``{"params/...": gradient}`` in the accumulation dtype, whole leaves by parameter, and metrics.
        """
        sums, weight, metrics = self._engine.gradients(state, self._flatten(batch))
        return join_gradients(self._layout, sums, np.asarray(weight)), metrics

    def _flatten(self, batch: Any) -> list[Any]:
        arrays, _ = flatten_batch(self.problem, batch, num_rows=None if self.rows is None else len(self.rows))
        return arrays

    def save_tree(self, state: State) -> Tree:
        """Whole leaves under plan-independent names; in the first process, where stages are in several."""
        return to_tree(self._layout, state, self._links)

    def abstract_tree(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, dtypes and, where a leaf is one array, shardings of :meth:`save_tree`."""
        return abstract_tree(self._layout)

    def load_tree(self, tree: Tree) -> State:
        """Place a saved tree; the arrays given are neither donated nor changed."""
        return from_tree(self._layout, tree, self._links)

    def warm_up(self) -> None:
        """Run one step on zeros and forget it: what an executable sets up in its first run is then done.

        On a CPU, whose kernels set themselves up in their first run, that takes 1 to 2 seconds of processor time,
        several steps of a small model. Elsewhere, and for states of a size at which a step takes long anyway,
        nothing is done: the memory may be needed.
        """
        entries = self._layout.entries
        sizes = [int(np.prod(e.shape)) * 8 * e.sharding.num_devices for e in entries]
        if sum(sizes) > _WARM_UP_BYTES or entries[0].sharding.mesh.devices.flat[0].platform != "cpu":
            return
        arrays = []
        for entry in entries:
            struct = jax.eval_shape(jax.random.key_data, entry.struct) if entry.is_key else entry.struct
            zeros = jax.device_put(np.zeros(struct.shape, struct.dtype), entry.sharding)
            arrays.append(jax.random.wrap_key_data(zeros) if entry.is_key else zeros)
        rows = self.problem.global_batch
        batch = [np.zeros(leaf.struct(rows).shape, leaf.struct(rows).dtype) for leaf in self.problem.batch]
        state, _ = self._engine.step(unflatten(self._layout, arrays, 0), batch)
        jax.block_until_ready(state.arrays)

    def plan_move(self, other: "Program") -> Move:
        """How a state of ``other`` comes here; kept, so that :meth:`take_from` need not plan it."""
        if self._move is None or self._move[0] is not other:
            self._move = other, Move(other.layout, self._layout)
        return self._move[1]

    def take_from(self, state: State, other: "Program") -> tuple[State, Moved]:
        """Move a state of ``other`` here leaf by leaf, consuming it; after an exception it is as it was."""
        return self.plan_move(other).run(state)

    def reshard_from(self, state: State, other: "Program") -> State:
        """Move a state of ``other`` to this program's plan; ``state`` stays valid."""
        return self.load_tree(other.save_tree(state))

    def model(self, state: State) -> Any:
        """A new module (or tree) with the state's values, whole on the devices of the first stage."""
        tree = self.save_tree(state)
        values: dict[str, list[Any]] = {PARAMS: [], FROZEN: [], STATE: []}
        for leaf, name in zip(self.problem.leaves, leaf_names(self.problem), strict=True):
            value = tree[name]
            value = jax.random.wrap_key_data(jnp.asarray(value)) if leaf.is_key else jnp.asarray(value)
            values[leaf.kind].append(value)
        if len(self.plan.stages) > 1:
            first = next(e for e in self._layout.entries if e.slot.stage == 0)
            values = jax.device_put(values, NamedSharding(first.sharding.mesh, PartitionSpec()))
        states = [self.problem.treedefs[kind].unflatten(values[kind]) for kind in (PARAMS, FROZEN, STATE)]
        module = nnx.merge(self.problem.graphdef, *states)
        return module.arrays if isinstance(module, ParameterTree) else module

    def optimizer_state(self, state: State) -> Any:
        """The optimizer state as the pytree that optax made."""
        tree = self.save_tree(state)
        leaves = [jnp.asarray(tree[f"opt/{name}"]) for name in self.problem.optimizer_names]
        return jax.tree.unflatten(jax.tree.structure(self.problem.optimizer_struct), leaves)


def _initialise(problem: Problem, layout: Layout, rngs: nnx.Rngs, links: Links) -> State:
    """Make every stage's entries by one program, whose results are sharded from the start."""
    graphdef, rng_state = nnx.split(rngs)
    names = leaf_names(problem)
    given = problem.make_values(rngs) if problem.concrete else None

    def values(state: Any) -> dict[str, Any]:
        leaves = problem.make_values(nnx.merge(graphdef, state)) if given is None else state
        tree = dict(zip(names, leaves, strict=True))
        count = len(problem.of_kind(PARAMS))
        optimizer = problem.optimizer.init(problem.treedefs[PARAMS].unflatten(leaves[:count]))
        opt_names = [f"opt/{name}" for name in problem.optimizer_names]
        return tree | dict(zip(opt_names, jax.tree.leaves(optimizer), strict=True))

    arrays: dict[int, Any] = {}
    for stage in range(len(layout.stages)):
        if not links.here(stage):
            continue
        chosen = [(i, e) for i, e in enumerate(layout.entries) if e.slot.stage == stage]

        def make(state: Any, chosen: list[tuple[int, Entry]] = chosen) -> list[Any]:
            tree = values(state)
            return [e.cut(tree[e.name]) for _, e in chosen]

        if given is None:
            on_cpu = chosen[0][1].sharding.mesh.devices.flat[0].platform == "cpu"
            jitted = jax.jit(
                make,
                out_shardings=[e.sharding for _, e in chosen],
                compiler_options=dict(_COMPILE_QUICKLY) if on_cpu else None,
            )
            made = jitted(rng_state)
        else:
            tree = values(given)
            made = own([e for _, e in chosen], [e.cut(tree[e.name]) for _, e in chosen])
        arrays.update((i, array) for (i, _), array in zip(chosen, made, strict=True))
    return unflatten(layout, [arrays.get(i) for i in range(len(layout.entries))], 0)
