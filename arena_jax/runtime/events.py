"""The event log as runtime code imports it; it lives in :mod:`arena_jax.events`, beside no part."""

from arena_jax.events import Event as Event
from arena_jax.events import EventLog as EventLog
from arena_jax.events import read_events as read_events
