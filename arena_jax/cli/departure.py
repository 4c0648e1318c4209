"""How a training of the command line leaves for devices that its process does not have; see ``relaunch``."""

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arena_jax.grid import CATALOGUE, Allocation, GridShape, Plan, Target
from arena_jax.relaunch import Note, Place

if TYPE_CHECKING:
    from arena_jax.runtime.checkpoint_info import CheckpointInfo
    from arena_jax.runtime.contract import Rehearsed, Relaunch
    from arena_jax.warm import WarmProcess

_SHARED_MEMORY = Path("/dev/shm")
# What a checkpoint in host memory takes besides the arrays.
_ROOM = 1.1


class Departure:
    """How a training of the command line goes elsewhere; :class:`arena_jax.runtime.contract.Elsewhere`.

    Args:
        run: the run's directory.
        warm: starts processes that plan and compile.
        num_devices: devices of this process.
        device_type: what they are.
        before: the note that this process went on from.
        first_step: completed steps before this process.
    """

    def __init__(
        self,
        run: Path,
        warm: "WarmProcess",
        *,
        num_devices: int,
        device_type: str,
        before: Note | None = None,
        first_step: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._run = run
        self._warm = warm
        self._num_devices = num_devices
        self._device_type = device_type
        self._before = before
        self._first_step = first_step if before is None else before.first_step
        self._options = dict(options or {})
        self._history: list[tuple[float, float]] = [] if before is None else list(before.history)
        self._swaps: list[dict[str, Any]] = [] if before is None else [dict(swap) for swap in before.swaps]
        self._last_step_at = 0.0

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Follow the run, for the account that the last process of a command gives."""
        if event["kind"] == "step":
            self._history.append((float(event["loss"]), float(event["step_time_s"])))
            self._last_step_at = time.time()
        elif event["kind"] == "swap":
            self._swaps.append({k: v for k, v in event.items() if k not in ("time", "kind")})

    def why(self, target: GridShape | Allocation, devices: Sequence[int] | None) -> str:
        allocation = target.allocation
        if allocation.device_type != self._device_type:
            return f"this process runs on {self._device_type} devices"
        platform = CATALOGUE[allocation.device_type].platform
        if platform == "cpu" and allocation.num_devices > self._num_devices:
            return f"this process has {self._num_devices} devices"
        return ""

    def rehearse(
        self,
        target: GridShape | Allocation,
        devices: Sequence[int] | None,
        *,
        num_microbatches: int,
        urgent: bool,
        cancelled: Callable[[], bool],
    ) -> "Rehearsed | None":
        return self._warm.rehearse(
            target,
            devices,
            num_devices=self._devices_for(target.allocation),
            num_microbatches=num_microbatches,
            urgent=urgent,
            cancelled=cancelled,
        )

    def hand_over(self, relaunch: "Relaunch | None", tree: Mapping[str, Any], info: "CheckpointInfo") -> None:
        from arena_jax.runtime.checkpoint import CheckpointStore

        assert relaunch is not None  # one process pauses by itself
        began_at, num_bytes = time.time(), sum(leaf.nbytes for leaf in tree.values())
        folder = _folder_for(num_bytes, self._run)
        try:
            with CheckpointStore(folder) as store:
                done = [*store.save(relaunch.step, tree, info), *store.wait()]
            for saved in done:
                if saved.error is not None:
                    raise OSError(saved.error)
            rehearsed, request = relaunch.rehearsed, relaunch.request
            Note(
                run=str(self._run),
                folder=str(folder),
                step=relaunch.step,
                here=Place(
                    plan=rehearsed.plan,
                    num_devices=self._devices_for(rehearsed.plan.grid.allocation),
                    estimated_step_time_s=rehearsed.estimated_step_time_s,
                    engine=rehearsed.engine,
                    devices=request.devices,
                ),
                back=Place(plan=Plan.from_json(dict(info.plan)), num_devices=self._num_devices),
                target=_text(request.target),
                request_id=request.id,
                reason=request.reason,
                background_s=relaunch.background_s,
                prepared=relaunch.prepared,
                left_at=self._last_step_at or began_at,
                began_at=began_at,
                num_bytes=num_bytes,
                first_step=self._first_step,
                history=tuple(self._history),
                swaps=tuple(self._swaps),
                options=self._options,
            ).write()
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def _devices_for(self, allocation: Allocation) -> int:
        """Devices of the process: of a plain CPU as many as before, so that it need not move to come back."""
        if allocation.device_type == "cpu" == self._device_type:
            return max(allocation.num_devices, self._num_devices)
        return allocation.num_devices


def _folder_for(num_bytes: int, run: Path) -> Path:
    """A new folder in host memory, or in the run's directory where that has no room."""
    try:
        if shutil.disk_usage(_SHARED_MEMORY).free > _ROOM * num_bytes:
            return Path(tempfile.mkdtemp(prefix="arena-jax-", dir=_SHARED_MEMORY))
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="handed-over-", dir=run))


def _text(target: Target) -> str:
    return str(target) if isinstance(target, GridShape | Allocation) else type(target).__name__.lower()
