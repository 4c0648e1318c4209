"""The toy model of ``tests.doubles`` as a recipe, for jobs whose processes each build it: ``tests.toy_job:job``."""

import os
import time
from typing import Any

import numpy as np
import optax

from tests.doubles import BATCH, WIDTH, Toy, toy_loss

# Seconds that reading a batch takes, where a run is to last.
ENV_PAUSE = "TOY_JOB_PAUSE_S"


class Batches(list[Any]):
    """Batches that take their time."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(float(os.environ.get(ENV_PAUSE, "0")))
        return super().__getitem__(index)


def job() -> dict[str, Any]:
    """A job of 16 different batches, over and over, with an optimizer that couples all parameters."""
    rows = np.random.default_rng(0).normal(size=(16, BATCH, WIDTH))
    return {
        "make_model": lambda rngs: Toy(rngs),
        "optimizer": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
        "loss_fn": toy_loss,
        "make_data": lambda: Batches([{"x": x, "y": np.tanh(x[:, ::-1])} for x in rows]),
    }
