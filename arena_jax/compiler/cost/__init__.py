"""Seconds for operations and collectives on a device type, from datasheet facts alone.

``efficiency`` holds what devices reach of their datasheets, ``matmul`` matrix products, ``links``
collectives, ``hardware`` the device type inside one allocation, which is what the search asks.
"""

from arena_jax.compiler.cost.efficiency import FITTED as FITTED
from arena_jax.compiler.cost.efficiency import Efficiency as Efficiency
from arena_jax.compiler.cost.hardware import OP_KINDS as OP_KINDS
from arena_jax.compiler.cost.hardware import Hardware as Hardware
from arena_jax.compiler.cost.hardware import hardware_of as hardware_of
from arena_jax.compiler.cost.links import Link as Link
from arena_jax.compiler.cost.links import links_of as links_of
from arena_jax.compiler.cost.links import transfer_s as transfer_s
