"""ElasticFlow: deadline-driven elastic training (Gu et al., ASPLOS 2023).

The minimum satisfactory share of a job is the smallest power-of-two profile of devices over time
slots whose work reaches its steps before the deadline, given what earlier deadlines hold: the level
is raised 1, 2, 4, ... and slots are filled backwards from the deadline. A job with a deadline is
admitted iff it and all admitted ones still fit. Devices left over double, again and again, the job
whose total device-time grows least; jobs with none come first. The loosened form has no deadlines, so
only the second part. The paper is homogeneous: here a job stays on the type it started on, and starts
on the type where that costs the least device-time among those with room.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from arena_jax.scheduler.policy import Decision, Jobs, View


@dataclass
class _Ladder:
    """Allocations of one job on one type: the fastest column per count, counts rising, speed rising."""

    columns: list[int]
    devices: list[int]
    step_s: list[float]


class ElasticFlow:
    """Uses remaining steps.

    Args:
        loose: no deadlines and no admission; everyone runs.
        slot_s: length of a time slot.
        reject: turn away jobs whose deadline cannot be met; else they run on what is left over.
    """

    def __init__(self, *, loose: bool = False, slot_s: float = 300.0, reject: bool = True) -> None:
        self.loose, self.slot_s, self.reject = loose, slot_s, reject
        self.name = "elasticflow-loose" if loose else "elasticflow"
        self.reset()

    def reset(self) -> None:
        self._admitted: dict[int, int] = {}  # job -> type it is promised on
        self._best_effort: set[int] = set()

    def get_state(self) -> Mapping[str, Any]:
        return {"admitted": list(self._admitted.items()), "best_effort": sorted(self._best_effort)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self._admitted = {int(k): int(v) for k, v in state["admitted"]}
        self._best_effort = set(state["best_effort"])

    def decide(self, view: View, jobs: Jobs, now: float) -> Decision:
        ladders = [self._ladders(view, jobs, i) for i in range(len(jobs))]
        share = {} if self.loose else self._admit(view, jobs, ladders, now)
        rejected = []
        if not self.loose and self.reject:
            hard = np.isfinite(jobs.deadline_s)
            rejected = [i for i in range(len(jobs)) if hard[i] and int(jobs.key[i]) not in self._admitted]
        chosen = self._distribute(view, jobs, ladders, share, set(rejected))
        wake = None
        if share:
            wake = now + self.slot_s
        return Decision(chosen, wake, tuple(int(i) for i in rejected))

    @staticmethod
    def _ladders(view: View, jobs: Jobs, i: int) -> dict[int, _Ladder]:
        types, devices = view.columns.type_of, view.columns.num_devices
        ladders: dict[int, _Ladder] = {}
        held = jobs.column[i]
        for k in range(len(view.columns.types)):
            if held >= 0 and types[held] != k:
                continue
            options = np.flatnonzero((types == k) & np.isfinite(jobs.step_s[i]))
            ladder = _Ladder([], [], [])
            for c in options[np.lexsort((jobs.step_s[i, options], devices[options]))]:
                if not ladder.devices or (devices[c] > ladder.devices[-1] and jobs.step_s[i, c] < ladder.step_s[-1]):
                    ladder.columns.append(int(c))
                    ladder.devices.append(int(devices[c]))
                    ladder.step_s.append(float(jobs.step_s[i, c]))
            if ladder.columns:
                ladders[k] = ladder
        return ladders

    # -- minimum satisfactory shares ---------------------------------------------------------------

    def _admit(
        self, view: View, jobs: Jobs, ladders: list[dict[int, _Ladder]], now: float
    ) -> dict[int, tuple[int, int]]:
        """Admit new jobs that fit with all admitted ones; return job -> (type, rung now, -1 for none)."""
        keys = jobs.key.tolist()
        hard = [i for i in range(len(jobs)) if np.isfinite(jobs.deadline_s[i])]
        for i in hard:
            if keys[i] in self._admitted or keys[i] in self._best_effort:
                continue
            options = sorted(ladders[i], key=lambda k: min(np.array(ladders[i][k].step_s) * ladders[i][k].devices))
            for k in options:
                trial = {**self._admitted, keys[i]: k}
                if self._fits(view, jobs, ladders, trial, now) is not None:
                    self._admitted[keys[i]] = k
                    break
            else:
                self._best_effort.add(keys[i])
        alive = set(keys)
        self._admitted = {key: k for key, k in self._admitted.items() if key in alive}
        return self._fits(view, jobs, ladders, self._admitted, now, partial=True) or {}

    def _fits(
        self,
        view: View,
        jobs: Jobs,
        ladders: list[dict[int, _Ladder]],
        admitted: Mapping[int, int],
        now: float,
        *,
        partial: bool = False,
    ) -> dict[int, tuple[int, int]] | None:
        """Shares in the present slot when all ``admitted`` jobs are filled by deadline, or ``None``."""
        members = [i for i in range(len(jobs)) if int(jobs.key[i]) in admitted]
        if not members:
            return {}
        last = max(float(jobs.deadline_s[i]) for i in members)
        num_slots = max(1, int(np.ceil((last - now) / self.slot_s)))
        free = np.repeat(view.capacity[:, None], num_slots, axis=1)
        shares: dict[int, tuple[int, int]] = {}
        for i in sorted(members, key=lambda i: jobs.deadline_s[i]):
            k = admitted[int(jobs.key[i])]
            ladder = ladders[i].get(k)
            profile = None if ladder is None else self._profile(ladder, jobs, i, now, free[k])
            if profile is None:
                if not partial:
                    return None
                continue
            used = np.array([0, *ladder.devices])[profile + 1] if ladder is not None else 0
            free[k, : len(profile)] -= used
            shares[i] = (k, int(profile[0]))
        return shares

    def _profile(self, ladder: _Ladder, jobs: Jobs, i: int, now: float, free: np.ndarray) -> np.ndarray | None:
        """Rungs (or -1) by slot up to the deadline, lowest level that suffices, filled backwards."""
        left = float(jobs.deadline_s[i]) - now
        # Kept for the changes to come: one down and one up again, besides what is being charged now.
        charge = 2.0 * float(jobs.restart_s.max()) + max(0.0, float(jobs.charge_until_s[i]) - now)
        if left <= 0:
            return None
        num_slots = int(np.ceil(left / self.slot_s))
        length = np.full(num_slots, self.slot_s)
        length[-1] = left - (num_slots - 1) * self.slot_s  # the deadline may lie within a slot
        devices = np.array(ladder.devices)
        rate = np.append(1.0 / np.array(ladder.step_s), 0.0)  # [-1] = nothing
        for level in range(len(devices)):
            rung = np.minimum(np.searchsorted(devices, free[:num_slots], side="right") - 1, level)
            need = float(jobs.remaining_steps[i]) + charge / ladder.step_s[level]
            done = np.cumsum((length * rate[rung])[::-1])[::-1]  # work from each slot to the deadline
            if done[0] < need:
                continue
            first = int(np.flatnonzero(done >= need)[-1])
            rung[:first] = -1
            return rung
        # Too late to be changed once more; as it is it may still make it.
        held = int(jobs.column[i])
        if held in ladder.columns and (free[:num_slots] >= devices[level := ladder.columns.index(held)]).all():
            ready = max(now, float(jobs.charge_until_s[i]))
            if ready + float(jobs.remaining_steps[i]) * ladder.step_s[level] <= float(jobs.deadline_s[i]):
                return np.full(num_slots, level)
        return None

    # -- what is left over -------------------------------------------------------------------------

    @staticmethod
    def _distribute(
        view: View,
        jobs: Jobs,
        ladders: list[dict[int, _Ladder]],
        share: Mapping[int, tuple[int, int]],
        excluded: set[int],
    ) -> np.ndarray:
        free = view.capacity.copy()
        at: dict[int, tuple[int, int]] = {}
        for i, (k, rung) in share.items():
            if rung >= 0:
                at[i] = (k, rung)
                free[k] -= ladders[i][k].devices[rung]

        def growth(i: int, k: int, rung: int) -> float:
            ladder = ladders[i][k]
            before = ladder.step_s[rung - 1] * ladder.devices[rung - 1] if rung else 0.0
            return float(jobs.remaining_steps[i]) * (ladder.step_s[rung] * ladder.devices[rung] - before)

        pending = [i for i in range(len(jobs)) if i not in at and i not in excluded]
        for i in sorted(pending, key=lambda i: min(growth(i, k, 0) for k in ladders[i])):
            for k in sorted(ladders[i], key=lambda k: growth(i, k, 0)):
                if ladders[i][k].devices[0] <= free[k]:
                    at[i] = (k, 0)
                    free[k] -= ladders[i][k].devices[0]
                    break
        growing = set(at)
        while growing and (free > 0).any():
            best = None
            for i in list(growing):
                k, rung = at[i]
                ladder = ladders[i][k]
                if rung + 1 >= len(ladder.columns) or ladder.devices[rung + 1] - ladder.devices[rung] > free[k]:
                    growing.discard(i)
                    continue
                cost = growth(i, k, rung + 1)
                if best is None or cost < best[0]:
                    best = (cost, i)
            if best is None:
                break
            i = best[1]
            k, rung = at[i]
            free[k] -= ladders[i][k].devices[rung + 1] - ladders[i][k].devices[rung]
            at[i] = (k, rung + 1)
        chosen = np.full(len(jobs), -1, dtype=np.int64)
        for i, (k, rung) in at.items():
            chosen[i] = ladders[i][k].columns[rung]
        return chosen
