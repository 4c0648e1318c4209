"""Exact re-assignment of a few device types at once: what moves cannot find on a small cluster.

Where one allocation is a large part of a type's devices, the best set of allocations may differ from
the present one in a dozen jobs at once, and no chain of improving moves leads there. Dealing out the
devices of one or two types anew, everyone elsewhere staying put, is a multiple-choice knapsack with
one dimension a type, solved by dynamic programming over devices left. On large clusters an
allocation is a small part of a type, prices alone come close (see :func:`price_bound`), and this is
neither needed nor affordable: ``budget`` bounds the table entries computed in a decision.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from arena_jax.scheduler.policies._moves import Moves

_EPS = 1e-9
_UNITS = (1, 2, 4)  # devices are counted in these when all types are dealt out at once


def price_bound(prices: np.ndarray, value: np.ndarray, type_of: np.ndarray, num_devices: np.ndarray,
                capacity: np.ndarray) -> float:  # fmt: skip
    """Upper bound on the summed value of allocations that fit: the Lagrangian at ``prices``."""
    net = value - prices[type_of] * num_devices
    return float(np.maximum(net.max(axis=1), 0.0).sum() + (prices * capacity).sum())


def affordable(moves: Moves, budget: float) -> bool:
    """Whether ``budget`` allows anything to be dealt out anew."""
    return next(_subsets(moves, budget), None) is not None


def repack(moves: Moves, bound: float, *, within: float, budget: float, rounds: int = 2) -> None:
    """Improve ``moves`` until the sum is ``within`` (a share) of ``bound`` or nothing helps."""
    for _ in range(rounds):
        improved = False
        for subset, unit in _subsets(moves, budget):
            if moves.total >= (1.0 - within) * bound:
                return
            improved |= deal(moves, subset, unit)
        if not improved:
            return


def _subsets(moves: Moves, budget: float) -> Iterator[tuple[tuple[int, ...], int]]:
    """Which types to deal out together, and the unit devices are counted in, as far as ``budget`` goes."""
    room = _room(moves).tolist()
    num_columns = np.bincount(moves.types[:-1], minlength=len(room)).tolist()

    def entries(subset: Sequence[int], unit: int) -> float:
        """Table entries that :func:`deal` computes at most."""
        states = math.prod(room[k] // unit + 1.0 for k in subset)
        return states * len(moves.value) * sum(num_columns[k] for k in subset)

    everything = tuple(range(len(room)))
    for unit in _UNITS:
        if entries(everything, unit) <= budget:
            yield everything, unit
            if unit == 1:  # exact: nothing left to find
                return
            break
    pairs = list(combinations(everything, 2))
    if sum(entries(pair, 1) for pair in pairs) <= budget:
        yield from ((pair, 1) for pair in pairs)


def _room(moves: Moves) -> np.ndarray:
    """Devices of each type that may be dealt out: free, or held by a job that is not settled."""
    column = moves.column[(moves.column != moves.none) & ~moves.settled]
    held = np.bincount(moves.types[column], weights=moves.devices[column], minlength=len(moves.free))
    return moves.free + held.astype(np.int64)


def deal(moves: Moves, subset: Sequence[int], unit: int = 1) -> bool:
    """Deal out the devices of the types in ``subset`` anew where that raises the sum; whether it did.

    Jobs on other types stay or come over, the others get a column of ``subset`` or none. Exact for
    ``unit`` 1; else counts are rounded up to multiples of ``unit``, which still fits.
    """
    shape = _room(moves)[list(subset)] // unit + 1
    num_states = int(np.prod(shape))
    strides = np.cumprod(np.append(shape[1:], 1)[::-1])[::-1]  # state: devices left per type, mixed radix
    columns = np.flatnonzero(np.isin(moves.types[:-1], subset))
    states = np.arange(num_states)
    # State after a column is taken; one past the end where it does not fit.
    after = np.full((len(columns), num_states), num_states)
    for row, column in enumerate(columns):
        axis = list(subset).index(int(moves.types[column]))
        need = -(-int(moves.devices[column]) // unit)
        fits = states // strides[axis] % shape[axis] >= need
        after[row, fits] = states[fits] - need * strides[axis]
    inside = np.isin(moves.types[moves.column], subset)
    held = moves.value[np.arange(len(inside)), moves.column]
    gain = moves.value[:, columns] - np.where(inside, 0.0, held)[:, None]
    gain[moves.settled] = -np.inf
    asking = np.flatnonzero((gain > _EPS).any(axis=1))
    best = np.zeros(num_states + 1)
    best[-1] = -np.inf
    taken = np.empty((len(asking), num_states), dtype=np.int64)
    for number, job in enumerate(asking):
        options = np.flatnonzero(gain[job] > _EPS)
        reached = best[after[options]] + gain[job, options][:, None]
        choice = reached.argmax(axis=0)
        top = reached[choice, states]
        taken[number] = np.where(top > best[:-1] + _EPS, options[choice], -1)
        best[:-1] = np.maximum(best[:-1], top)
    cleared = np.flatnonzero(inside & ~moves.settled)
    if best[num_states - 1] <= held[cleared].sum() + _EPS:
        return False
    state = num_states - 1
    for job in cleared:
        moves.set(int(job), moves.none)
    for number in range(len(asking) - 1, -1, -1):
        option = taken[number, state]
        if option >= 0:
            moves.set(int(asking[number]), int(columns[option]))
            state = after[option, state]
    return True
