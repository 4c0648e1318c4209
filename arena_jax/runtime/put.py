"""Host values under shardings, also where devices of other processes take part.

``jax.device_put`` to devices of several processes compares the values of all processes first, by a
collective. Here each process gives the shards of its own devices and trusts the others to give the same.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def put(values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """As ``jax.device_put`` of lists; where a sharding spans processes, all of them must call this alike."""
    if all(sharding.is_fully_addressable for sharding in shardings):
        placed: list[Any] = jax.device_put(list(values), list(shardings))
        return placed
    return [_put(value, sharding) for value, sharding in zip(values, shardings, strict=True)]


def _put(value: Any, sharding: Any) -> Any:
    is_global = isinstance(value, jax.Array) and not value.is_fully_addressable
    if is_global or sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        # The data has one dim more than the keys, which stays whole.
        return jax.random.wrap_key_data(_put(jax.random.key_data(value), sharding))
    host = np.asarray(value)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])


def spans_processes(sharding: Any) -> bool:
    """Whether some of the devices are this process's, and some are not."""
    return bool(0 < len(sharding.addressable_devices) < sharding.num_devices)


def own_rows(sharding: Any, num_microbatches: int, rows: int) -> np.ndarray | None:
    """Which rows of a global batch of ``num_microbatches * rows`` this process has to give, ascending.

    Args:
        sharding: of an array whose first dims are (microbatches, rows), or (rows) for one microbatch.

    Returns:
        int64 row numbers; ``None`` for all, where no other process takes part.
    """
    if not spans_processes(sharding):
        return None
    lead = (num_microbatches, rows) if num_microbatches > 1 else (rows,)
    numbers = np.arange(num_microbatches * rows).reshape(lead)
    indices = sharding.addressable_devices_indices_map(lead).values()
    return np.unique(np.concatenate([numbers[index].ravel() for index in indices]))


def put_rows(local: Any, rows: np.ndarray, sharding: Any, num_microbatches: int, num_rows: int) -> Any:
    """A batch leaf from this process's rows of it.

    Args:
        local: array of shape (len(rows), ...): the rows whose numbers are ``rows``.
        num_rows: rows of one microbatch.

    Returns:
        Global array of shape (microbatches, num_rows, ...), without the first dim for one microbatch.
    """
    host = np.asarray(local)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    lead = (num_microbatches, num_rows) if num_microbatches > 1 else (num_rows,)
    position = np.full(num_microbatches * num_rows, -1)
    position[rows] = np.arange(len(rows))
    position = position.reshape(lead)

    def shard(index: Any) -> np.ndarray:
        taken = host[position[index[: len(lead)]]]
        return np.asarray(taken[(slice(None),) * len(lead) + index[len(lead) :]])

    return jax.make_array_from_callback((*lead, *host.shape[1:]), sharding, shard)
