"""A stage whose data-parallel shards each compute the gradients of their own rows.

The stage is evaluated once a shard, by ``jax.vmap`` over a leading dim that is sharded over dp, on a trace of the
loss at the rows of one shard. Parameters are spread over that dim, so that their cotangents keep it: gradients
are summed shard by shard over the microbatches and reduced over dp once a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from arena_jax.compiler.trace import MEAN
from arena_jax.grid import Spec
from arena_jax.runtime.engine import Sums
from arena_jax.runtime.placement import StagePlacement
from arena_jax.runtime.stage_function import StageFunction, StageInputs

_DP = "dp"
_OPEN = PartitionSpec.UNCONSTRAINED


@dataclass(frozen=True, kw_only=True)
class RowShards:
    """Evaluates a stage shard by shard; inputs and results are those of the whole microbatch.

    Attributes:
        function: the stage at the rows of one shard.
        has_rows: for each batch input, whether it has rows.
    """

    function: StageFunction
    has_rows: tuple[bool, ...]

    @property
    def placement(self) -> StagePlacement:
        return self.function.placement

    def spread(self, params: Sequence[Any]) -> list[Any]:
        """Parameters with a leading dim of shards."""
        return [self._over_dp(jnp.broadcast_to(p, (self.placement.plan.dp, *p.shape))) for p in params]

    def gradient_sharding(self, sharding: NamedSharding) -> NamedSharding:
        """How the gradients of all shards lie, given how their sum does."""
        return NamedSharding(sharding.mesh, PartitionSpec(_DP, *sharding.spec))

    def __call__(self, inputs: StageInputs) -> tuple[list[Any], dict[int, Any]]:
        """As :class:`StageFunction`; ``inputs.params`` are spread."""

        def one(params: Any, batch: Any, received: Any) -> tuple[list[Any], dict[int, Any]]:
            return self.function(replace(inputs, params=params, batch=batch, received=received))

        rows_at = [0 if has_rows else None for has_rows in self.has_rows]
        batch = [self._split(x) if has_rows else x for x, has_rows in zip(inputs.batch, self.has_rows, strict=True)]
        shards = jax.vmap(one, in_axes=(0, rows_at, 0), spmd_axis_name=_DP)
        sent, outputs = shards(list(inputs.params), batch, [self._split(x) for x in inputs.received])
        return [self._merge(x) for x in sent], {p: self._whole(p, x) for p, x in outputs.items()}

    def _split(self, x: Any) -> Any:
        dp = self.placement.plan.dp
        return self._over_dp(x.reshape(dp, x.shape[0] // dp, *x.shape[1:]))

    def _merge(self, x: Any) -> Any:
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    def _over_dp(self, x: Any) -> Any:
        spec = PartitionSpec(_DP, *(_OPEN,) * (x.ndim - 1))
        return lax.with_sharding_constraint(x, NamedSharding(self.placement.mesh, spec))

    def _whole(self, position: int, value: Any) -> Any:
        """An output of the microbatch, given that of every shard."""
        sums = Sums(trace=self.function.trace)
        if position >= sums.num_outputs:  # state that depends on no data
            return value[0]
        is_mean = position < 2 and not self.function.trace.weighted
        return value.mean(0) if is_mean or sums.kind(position) == MEAN else value.sum(0)


def row_shards(whole: StageFunction, part: StageFunction, has_rows: Sequence[bool]) -> RowShards | None:
    """The shards of a stage, or ``None`` where it cannot be put together from them.

    A value that crosses stages has to begin with its rows, and no parameter may lie over dp.

    Args:
        whole, part: the stage at the rows of a microbatch, and of one shard.
        has_rows: for each leaf of the batch, whether it has rows.
    """
    placement, mine, theirs = whole.placement, whole.stage, part.stage
    dp = placement.plan.dp
    crossing = [(*mine.sent, *mine.received), (*theirs.sent, *theirs.received)]
    if len(crossing[0]) != len(crossing[1]) or mine.outputs != theirs.outputs or mine.batch_index != theirs.batch_index:
        return None
    for full, own in zip(*crossing, strict=True):
        if not own.aval.shape or full.aval.shape != (dp * own.aval.shape[0], *own.aval.shape[1:]):
            return None
    if any(_DP in _axes(spec) for spec in placement.plan.parameters.values()):
        return None
    specs = {key: tuple(map(_without_dp, spec)) for key, spec in part.specs.items()}
    return RowShards(function=replace(part, specs=specs), has_rows=tuple(has_rows[i] for i in mine.batch_index))


def _axes(spec: Spec) -> set[str]:
    return {axis for dim in spec for axis in ((dim,) if isinstance(dim, str) else dim or ())}


def _without_dp(dim: Any) -> Any:
    """Of a dim of a spec what is left inside one shard."""
    rest = tuple(axis for axis in _axes((dim,)) if axis != _DP)
    return rest[0] if len(rest) == 1 else rest or None
