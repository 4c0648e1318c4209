"""What a group of processes begins from: a checkpoint of the run, or the state that the group before it handed over."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from arena_jax.runtime.checkpoint_info import complete_steps


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """A state between two groups.

    Attributes:
        folder, step: of the checkpoint that holds it.
        left_s: unix seconds when the group before left it.
    """

    folder: Path
    step: int
    left_s: float

    @property
    def whole(self) -> bool:
        """Whether it is still there."""
        return self.step in complete_steps(self.folder)


class States:
    """The states of one run.

    Args:
        checkpoints: the run's folder of them.
        resume_step: the checkpoint to begin from before any other was made; ``None`` for the beginning.
    """

    def __init__(self, checkpoints: Path, resume_step: int | None) -> None:
        self._checkpoints = checkpoints
        self._resume_step = resume_step
        self.handed_over: HandedOver | None = None

    def hand_over(self, state: HandedOver) -> None:
        """Take the state that a group has left, in place of an earlier one."""
        if self.handed_over is not None and self.handed_over.folder != state.folder:
            self.forget()
        self.handed_over = state

    def last(self, *, has_stepped: bool) -> tuple[int | None, str | None]:
        """Step and folder of the last complete state; no folder where it is a checkpoint of the run.

        Args:
            has_stepped: whether a boundary was reached. Until then, later checkpoints than the one asked for may
                still be in place.
        """
        saved = complete_steps(self._checkpoints) if has_stepped else []
        handed_over = self.handed_over
        if handed_over is not None and handed_over.step >= max(saved, default=-1) and handed_over.whole:
            return handed_over.step, str(handed_over.folder)
        return (saved[-1] if saved else self._resume_step), None

    def forget_if_passed(self) -> None:
        """Remove what was handed over, once a checkpoint is further."""
        if self.handed_over is not None:
            steps = complete_steps(self._checkpoints)
            if steps and steps[-1] > self.handed_over.step:
                self.forget()

    def keep(self) -> None:
        """Make what was handed over a checkpoint of the run, where it is further than the last."""
        handed_over = self.handed_over
        if handed_over is None or not self._checkpoints.is_dir() or not handed_over.whole:
            return
        if handed_over.step > max(complete_steps(self._checkpoints), default=-1):
            # Under a name that is no checkpoint's until all of it is there.
            coming = self._checkpoints / f"{handed_over.step}.moving"
            shutil.move(handed_over.folder / str(handed_over.step), coming)
            coming.rename(self._checkpoints / str(handed_over.step))

    def forget(self) -> None:
        """Remove what was handed over."""
        handed_over, self.handed_over = self.handed_over, None
        if handed_over is not None:
            shutil.rmtree(handed_over.folder, ignore_errors=True)
