"""How a worker of a group leaves for another group."""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from arena_jax.errors import ArenaError, InfeasibleError
from arena_jax.grid import Allocation, GridShape, Plan
from arena_jax.processes.messages import request_to_json
from arena_jax.processes.post import Post
from arena_jax.runtime.checkpoint import CheckpointStore
from arena_jax.runtime.checkpoint_info import CheckpointInfo
from arena_jax.runtime.contract import Rehearsed, Relaunch
from arena_jax.runtime.peers import Peers

_POLL_S = 0.05
# Host memory must hold the handed-over state so many times, as it is written while the arrays still exist.
_ROOM = 2.0
_MEMORY_FOLDER = Path("/dev/shm")


class OtherProcesses:
    """How a training leaves for another group of processes; :class:`arena_jax.runtime.contract.Elsewhere`.

    Args:
        post: the line.
        peers: the processes of this group; ``None`` for one.
        run_path, run_id: the run's directory.
    """

    def __init__(self, post: Post, peers: Peers | None, *, run_path: Path, run_id: str) -> None:
        self._post = post
        self._peers = peers
        self._run_path, self._run_id = run_path, run_id
        self._asked = 0
        self._planned: set[GridShape | Allocation] = set()

    def why(self, target: GridShape | Allocation, devices: Sequence[int] | None) -> str:
        """Why a target needs other processes; empty where this one can swap to it."""
        allocation = target.allocation
        if self._peers is not None:
            return "a job of several processes changes its plan by a relaunch"
        if allocation.num_nodes > 1:
            return f"{allocation} is {allocation.num_nodes} processes"
        if allocation.num_devices > len(jax.devices()):
            return f"this process has {len(jax.devices())} devices"
        return ""

    def rehearse(
        self,
        target: GridShape | Allocation,
        devices: Sequence[int] | None,
        *,
        num_microbatches: int,
        urgent: bool,
        cancelled: Callable[[], bool],
    ) -> Rehearsed | None:
        """Have the supervisor plan for the target and, where it can, start the processes that will run it."""
        if not urgent and target in self._planned:
            return None
        self._asked += 1
        self._post.line.send(
            say="rehearse", number=self._asked, target=str(target), num_microbatches=num_microbatches, urgent=urgent
        )
        while not cancelled():
            answer = self._post.wait("rehearsed", _POLL_S)
            if answer is None or answer["number"] != self._asked:
                continue
            if not urgent:
                # The plan is in the store, which makes planning quick when it is wanted; processes that may
                # never be needed are not started.
                self._planned |= set() if "later" in answer else {target}
                return None
            if "error" in answer:
                raise InfeasibleError(answer["error"], hint=answer.get("hint", ""))
            return Rehearsed(
                plan=Plan.from_json(answer["plan"]),
                estimated_step_time_s=answer.get("estimated_step_time_s"),
                engine=answer.get("engine", ""),
            )
        self._post.line.send(say="cancel", number=self._asked)
        return None

    def hand_over(self, relaunch: Relaunch | None, tree: dict[str, Any], info: CheckpointInfo) -> None:
        """Save the state in host memory where there is room, otherwise beside the run's checkpoints."""
        left_s = time.time()
        peers = self._peers
        folder = str(self._folder(tree)) if peers is None or peers.leads else ""
        folder = folder if peers is None else peers.share(folder)
        error = None
        try:
            with CheckpointStore(folder, keep=1, peers=peers) as store:
                store.prepare()
                saves = [*store.save(info.step, tree, info), *store.wait()]
            error = next((saved.error for saved in saves if saved.error is not None), None)
        except Exception as caught:
            error = str(caught)
        if peers is not None and not peers.unanimous(error is None):
            error = error or "another process could not write"
        if error is not None:
            raise ArenaError(f"the state could not be handed over: {error}")
        if peers is None or peers.leads:
            self._post.line.send(
                say="handed_over",
                folder=folder,
                step=info.step,
                left_s=left_s,
                relaunch=None if relaunch is None else _relaunch_to_json(relaunch),
            )

    def _folder(self, tree: dict[str, Any]) -> Path:
        needed_bytes = _ROOM * sum(leaf.size * np.dtype(leaf.dtype).itemsize for leaf in tree.values())
        on_disk = self._run_path / "handed-over"
        try:
            room_bytes = shutil.disk_usage(_MEMORY_FOLDER).free
            folder = _MEMORY_FOLDER / f"arena-jax-{os.geteuid()}-{self._run_id}"
            if room_bytes < needed_bytes or _free_memory_bytes() < needed_bytes:
                return on_disk
            folder.mkdir(mode=0o700, exist_ok=True)
            # Everybody may make folders there; one of another owner is not used.
            return folder if folder.stat().st_uid == os.geteuid() and not folder.is_symlink() else on_disk
        except OSError:
            return on_disk


def _free_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _relaunch_to_json(relaunch: Relaunch) -> dict[str, Any]:
    return {
        "plan": relaunch.rehearsed.plan.to_json(),
        "estimated_step_time_s": relaunch.rehearsed.estimated_step_time_s,
        "engine": relaunch.rehearsed.engine,
        "from": str(relaunch.source),
        "request": request_to_json(relaunch.request),
        "id": relaunch.request.id,
        "reason": relaunch.request.reason,
        "background_s": relaunch.background_s,
        "prepared": relaunch.prepared,
    }
