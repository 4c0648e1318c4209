"""Interleaved pairs: two things timed in turn, so that what else the machine does hits both alike."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Run = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Times of the pairs, in the order they were taken.

    Attributes:
        ours_s, theirs_s: wall time of each repeat.
        ours_cpu_s, theirs_cpu_s: processor time of all the process's threads. Other processes slow a
            step down but add little to its processor time, so this ratio is the steadier of the two.
    """

    ours_s: np.ndarray
    theirs_s: np.ndarray
    ours_cpu_s: np.ndarray
    theirs_cpu_s: np.ndarray

    @property
    def ratios(self) -> np.ndarray:
        return self.ours_s / self.theirs_s

    @property
    def ratio(self) -> float:
        """Median over the pairs of our wall time over theirs."""
        return float(np.median(self.ratios))

    @property
    def cpu_ratio(self) -> float:
        return float(np.median(self.ours_cpu_s / self.theirs_cpu_s))

    def interval(self, *, confidence: float = 0.95, num_resamples: int = 2000) -> tuple[float, float]:
        """Bootstrap interval of :attr:`ratio`."""
        random = np.random.default_rng(0)
        drawn = random.choice(self.ratios, (num_resamples, len(self.ratios)))
        low, high = np.quantile(np.median(drawn, axis=1), [(1 - confidence) / 2, (1 + confidence) / 2])
        return float(low), float(high)

    def to_json(self) -> dict[str, Any]:
        return {
            "num_pairs": len(self.ratios),
            "ratio": self.ratio,
            "ratio_interval_95": self.interval(),
            "cpu_time_ratio": self.cpu_ratio,
            "ours_median_s": float(np.median(self.ours_s)),
            "theirs_median_s": float(np.median(self.theirs_s)),
            "ours_s": [round(t, 6) for t in self.ours_s.tolist()],
            "theirs_s": [round(t, 6) for t in self.theirs_s.tolist()],
        }


def interleave(ours: Run, theirs: Run, *, num_pairs: int, num_warmup: int = 3) -> Pairs:
    """Time both in turn, the order of a pair changing from one to the next. Each call must wait for its result."""
    for _ in range(num_warmup):
        ours()
        theirs()
    times: dict[Run, list[tuple[float, float]]] = {ours: [], theirs: []}
    for i in range(num_pairs):
        for run in (ours, theirs) if i % 2 else (theirs, ours):
            times[run].append(_timed(run))
    a, b = np.array(times[ours]), np.array(times[theirs])
    return Pairs(ours_s=a[:, 0], ours_cpu_s=a[:, 1], theirs_s=b[:, 0], theirs_cpu_s=b[:, 1])


def _timed(run: Run) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu
