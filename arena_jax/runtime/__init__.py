"""Runs programs: step schedules, trainer, swap, checkpoint, the scheduler hook."""
