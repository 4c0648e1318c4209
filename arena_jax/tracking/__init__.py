"""Sending a run's event log to a tracker. Nothing here imports mlflow before a run is opened."""

from arena_jax.tracking.mlflow import MLflowTracker as MLflowTracker
from arena_jax.tracking.protocol import StatefulTracker as StatefulTracker
from arena_jax.tracking.protocol import Tracker as Tracker
from arena_jax.tracking.sink import STATE_FILE_NAME as STATE_FILE_NAME
from arena_jax.tracking.sink import Sink as Sink
from arena_jax.tracking.sink import short_reason as short_reason
from arena_jax.tracking.sink import stored_state as stored_state
from arena_jax.tracking.sink import sync as sync
