"""Prices per device type: the dual of sharing the cluster.

Maximising the summed value over allocations that fit is an assignment program. Its Lagrangian prices
one device of each type; every job then takes the column of largest value - price x devices, and the
prices move until what the jobs want fits what there is. Between events prices hardly change, so they
start from the last event's and a few steps are enough. They tell what a device of each type is worth
now, and they only *propose*: the moves that follow are judged by value alone.
"""

import numpy as np

from arena_jax.scheduler.policy import View

_TOLERANCE = 0.03  # excess demand, as a share of a type's devices, that the moves can repair
_SAMPLE = 1500  # jobs looked at while prices are sought


def update(
    prices: np.ndarray,
    value: np.ndarray,
    type_of: np.ndarray,
    num_devices: np.ndarray,
    capacity: np.ndarray,
    *,
    max_steps: int,
    first_step: float,
) -> np.ndarray:
    """New prices per type from the last ones, in at most ``max_steps`` multiplicative steps."""
    stride = -(-len(value) // _SAMPLE)
    sample = np.ascontiguousarray(value[::stride])
    devices = num_devices.astype(float)
    room = np.maximum(capacity.astype(float), 1.0)
    scale = stride / room
    prices = prices.copy()
    floor = 1e-4
    step = first_step
    for _ in range(max_steps):
        excess = _demand(sample, prices[type_of] * devices, type_of, devices, len(room)) * scale - capacity / room
        settled = (excess <= 0).all() and ((prices == 0) | (excess > -_TOLERANCE)).all()
        if settled:
            break
        prices *= np.exp(np.clip(4.0 * excess, -1.0, 1.0) * step)
        prices = np.where((prices < floor) & (excess > 0), 10 * floor, prices)
        prices[prices < floor] = 0.0
        step = max(step * 0.93, 0.02)
    return prices


def _demand(
    value: np.ndarray, rent: np.ndarray, type_of: np.ndarray, devices: np.ndarray, num_types: int
) -> np.ndarray:
    net = value - rent
    best = net.argmax(axis=1)
    wanted = best[net[np.arange(len(net)), best] > 0]
    return np.bincount(type_of[wanted], weights=devices[wanted], minlength=num_types)


def wanted(prices: np.ndarray, value: np.ndarray, held: np.ndarray, fixed: np.ndarray, view: View) -> np.ndarray:
    """What each job takes at these prices, least gain dropped where a type is asked for too much.

    Returns columns (or -1) that fit. Jobs that are ``fixed`` keep what they hold.
    """
    types, devices = view.columns.type_of, view.columns.num_devices
    rows = np.arange(len(value))
    net = value - prices[types] * devices
    chosen = net.argmax(axis=1)
    # Where it makes no difference a job stays where it is.
    running = np.flatnonzero(held >= 0)
    stay = running[net[running, held[running]] >= net[running, chosen[running]] - 1e-9]
    chosen[stay] = held[stay]
    gain = net[rows, chosen]
    chosen[gain <= 0] = -1
    gain[fixed], chosen[fixed] = np.inf, held[fixed]
    for k in range(len(view.capacity)):
        asking = np.flatnonzero((chosen >= 0) & (types[np.maximum(chosen, 0)] == k))
        asking = asking[np.argsort(-gain[asking], kind="stable")]
        over = np.cumsum(devices[chosen[asking]]) > view.capacity[k]
        chosen[asking[over]] = -1
    return chosen
