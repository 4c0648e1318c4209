"""A stage as a pure function, made of the equations that were costed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from arena_jax.compiler import _compat
from arena_jax.compiler.emit import Emitter
from arena_jax.compiler.graph import Node
from arena_jax.compiler.stages import Stage, is_differentiable
from arena_jax.compiler.trace import Trace
from arena_jax.grid import Spec
from arena_jax.runtime.placement import StagePlacement


@dataclass(frozen=True, kw_only=True)
class StageInputs:
    """Arrays of one stage, each list aligned with the variables of :class:`Stage`."""

    params: Sequence[Any]
    frozen: Sequence[Any]
    state: Sequence[Any]
    batch: Sequence[Any]
    consts: Sequence[Any]
    received: Sequence[Any]


@dataclass(frozen=True, kw_only=True)
class StageFunction:
    """Evaluates one stage on its mesh.

    Attributes:
        segments: the stage's nodes, split where layers begin; with ``remat`` each is recomputed in
            the backward pass.
        specs: partition specs of values, by key.
    """

    trace: Trace
    stage: Stage
    placement: StagePlacement
    segments: tuple[tuple[Node, ...], ...]
    remat: bool
    specs: Mapping[str, Spec]

    @property
    def differentiable_received(self) -> tuple[Any, ...]:
        return tuple(v for v in self.stage.received if is_differentiable(v))

    @property
    def differentiable_sent(self) -> tuple[Any, ...]:
        return tuple(v for v in self.stage.sent if is_differentiable(v))

    def __call__(self, inputs: StageInputs) -> tuple[list[Any], dict[int, Any]]:
        """Return the values sent on, and ``{output position: value}``."""
        stage = self.stage
        env: dict[Any, Any] = {}
        for variables, arrays in (
            (stage.params, inputs.params),
            (stage.frozen, inputs.frozen),
            (stage.state, inputs.state),
            (stage.batch, inputs.batch),
            (stage.consts, inputs.consts),
            (stage.received, inputs.received),
        ):
            env.update(zip(variables, arrays, strict=True))
        emitter = Emitter(self.placement.mesh, self.specs, remat_scans=self.remat)
        if self.remat:
            self._run_rematerialised(emitter, env)
        else:
            for segment in self.segments:
                emitter.run([(n.key, n.eqn) for n in segment], env)
        outvars = self.trace.jaxpr.outvars
        outputs = {p: _read(outvars[p], env) for p in stage.outputs}
        return [env[v] for v in stage.sent], outputs

    def _run_rematerialised(self, emitter: Emitter, env: dict[Any, Any]) -> None:
        wanted: set[Any] = set(self.stage.sent)
        wanted |= {self.trace.jaxpr.outvars[p] for p in self.stage.outputs if _is_var(self.trace.jaxpr.outvars[p])}
        later: list[set[Any]] = []
        for segment in reversed(self.segments):
            later.append(set(wanted))
            wanted |= {a for n in segment for a in n.eqn.invars if _is_var(a)}
        for segment, used_later in zip(self.segments, reversed(later), strict=True):
            made = {v for n in segment for v in n.eqn.outvars}
            ins = list(dict.fromkeys(a for n in segment for a in n.eqn.invars if _is_var(a) and a not in made))
            outs = [v for n in segment for v in n.eqn.outvars if v in used_later]

            def run(
                values: list[Any], segment: tuple[Node, ...] = segment, ins: list[Any] = ins, outs: list[Any] = outs
            ) -> list[Any]:
                inner = dict(zip(ins, values, strict=True))
                emitter.run([(n.key, n.eqn) for n in segment], inner)
                return [inner[v] for v in outs]

            env.update(zip(outs, jax.checkpoint(run)([env[v] for v in ins]), strict=True))


def make_stage_function(
    trace: Trace, stage: Stage, placement: StagePlacement, layer_nodes: Mapping[int, Any], *, constrain: bool = True
) -> StageFunction:
    """Build the function.

    Args:
        layer_nodes: ``id`` of the equations at which layers begin.
        constrain: whether the trace is the one whose values the plan names.
    """
    segments: list[list[Node]] = [[]]
    for node in stage.nodes:
        if id(node.eqn) in layer_nodes and segments[-1]:
            segments.append([])
        segments[-1].append(node)
    return StageFunction(
        trace=trace,
        stage=stage,
        placement=placement,
        segments=tuple(tuple(s) for s in segments),
        remat=placement.plan.remat,
        specs=placement.plan.activations if constrain else {},
    )


def _is_var(atom: Any) -> bool:
    return not isinstance(atom, _compat.Literal)


def _read(atom: Any, env: Mapping[Any, Any]) -> Any:
    if not isinstance(atom, _compat.Literal):
        return env[atom]
    aval: Any = atom.aval
    return jnp.asarray(atom.val, aval.dtype)
