"""Queues and their shares, weighed by what devices are worth."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from arena_jax.errors import UsageError, nearest
from arena_jax.scheduler import Cluster

DEFAULT = "default"
# What a queue has used counts half as much after so many seconds.
HALF_LIFE_S = 600.0
# Bounds on how much a share can move a job's weight, either way.
_MOST = 4.0


@dataclass(frozen=True)
class Queues:
    """Named shares; only their ratios matter. Any queue may be used; one without a table has share 1."""

    shares: Mapping[str, float] = field(default_factory=lambda: {DEFAULT: 1.0})

    def share(self, name: str) -> float:
        return self.shares.get(name, 1.0)

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any], *, source: str) -> "Queues":
        """Read ``[queues.NAME]`` tables with a ``share``; raise :class:`UsageError` that names the fault."""
        shares = {DEFAULT: 1.0}
        for name, table in tables.items():
            for key in table if isinstance(table, Mapping) else ["?"]:
                if key != "share":
                    raise UsageError(f"{source}: queues.{name}: unknown key {key!r}{nearest(key, ('share',))}")
            share = table.get("share", 1.0)
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < math.inf:
                raise UsageError(f"{source}: queues.{name}.share must be a number above 0, got {share!r}")
            shares[name] = float(share)
        return cls(shares)


def worth_of(cluster: Cluster) -> dict[str, float]:
    """What a device of each type is worth, on any scale: its price, or its float32 rate where one has no price."""
    types = [cluster.catalogue[name] for name in cluster.types]
    prices = [t.price_per_hour for t in types]
    if all(price is not None for price in prices):
        return {t.name: float(price or 0.0) for t, price in zip(types, prices, strict=True)}
    return {t.name: t.peak("float32") for t in types}


@dataclass
class Usage:
    """Worth of the devices each queue has held over time, forgotten by halves."""

    used: dict[str, float] = field(default_factory=dict)
    at: float = 0.0

    def advance(self, now: float, holding: Iterable[tuple[str, float]]) -> None:
        """Add the time since the last call, during which ``(queue, worth)`` were held."""
        passed = max(0.0, now - self.at) if self.at else 0.0
        keep = 0.5 ** (passed / HALF_LIFE_S)
        self.used = {name: value * keep for name, value in self.used.items() if value * keep > 1e-9}
        for name, worth in holding:
            self.used[name] = self.used.get(name, 0.0) + worth * passed
        self.at = now

    def factors(self, queues: Queues, active: Iterable[str]) -> dict[str, float]:
        """By what to multiply the weights of each active queue's jobs: share due over share had, within bounds."""
        names = sorted(set(active))
        total_share = sum(queues.share(name) for name in names)
        total_used = sum(self.used.get(name, 0.0) for name in names)
        if len(names) < 2 or total_used <= 0:
            return dict.fromkeys(names, 1.0)
        factors = {}
        for name in names:
            due = queues.share(name) / total_share
            had = self.used.get(name, 0.0) / total_used
            factors[name] = _MOST if had <= due / _MOST else max(1 / _MOST, due / had)
        return factors
