"""Policies by name."""

from collections.abc import Callable

from arena_jax.errors import UsageError, nearest
from arena_jax.scheduler.policies.arena import Arena as Arena
from arena_jax.scheduler.policies.arena_paper import ArenaPaper as ArenaPaper
from arena_jax.scheduler.policies.elasticflow import ElasticFlow as ElasticFlow
from arena_jax.scheduler.policies.fcfs import Fcfs as Fcfs
from arena_jax.scheduler.policies.fcfs_elastic import FcfsElastic as FcfsElastic
from arena_jax.scheduler.policies.gavel import Gavel as Gavel
from arena_jax.scheduler.policies.sia import Sia as Sia
from arena_jax.scheduler.policies.srtf import Srtf as Srtf
from arena_jax.scheduler.policies.tiresias import Tiresias as Tiresias
from arena_jax.scheduler.policy import Policy

POLICIES: dict[str, Callable[[], Policy]] = {
    "arena": Arena,
    "fcfs": Fcfs,
    "fcfs-backfill": lambda: Fcfs(blocking="none"),
    "fcfs-elastic": FcfsElastic,
    "fcfs-elastic-any": lambda: FcfsElastic(any_type=True),
    "srtf": Srtf,
    "tiresias": Tiresias,
    "gavel": Gavel,
    "gavel-throughput": lambda: Gavel(objective="throughput"),
    "sia": Sia,
    "sia-negative": lambda: Sia(p=-0.5),
    "elasticflow": ElasticFlow,
    "elasticflow-loose": lambda: ElasticFlow(loose=True),
    "arena-paper": ArenaPaper,
}

# Each paper's own form: how it is made, and seconds between its decisions (0: at events).
PAPER_FORMS: dict[str, tuple[Callable[[], Policy], float]] = {
    "sia": (lambda: Sia(ramp=True, round_s=60.0), 60.0),
    "sia-negative": (lambda: Sia(p=-0.5, ramp=True, round_s=60.0), 60.0),
    "gavel": (lambda: Gavel(round_s=360.0), 360.0),
    "gavel-throughput": (lambda: Gavel(objective="throughput", round_s=360.0), 360.0),
    "arena-paper": (ArenaPaper, 300.0),
}


def make_policy(name: str) -> tuple[Policy, float]:
    """A new policy by name, and the seconds between its decisions.

    ``NAME`` decides at every event (0 s); ``NAME@paper`` runs in its paper's form. Raises
    :class:`UsageError` naming the nearest.
    """
    base, at, form = name.partition("@")
    if base not in POLICIES:
        raise UsageError(f"unknown policy {base!r}{nearest(base, POLICIES)}", hint=f"policies: {', '.join(POLICIES)}")
    if not at:
        return POLICIES[base](), 0.0
    if form != "paper" or base not in PAPER_FORMS:
        raise UsageError(
            f"policy {name!r} has no such form",
            hint=f"with @paper: {', '.join(PAPER_FORMS)}; all others decide at events",
        )
    make, round_s = PAPER_FORMS[base]
    return make(), round_s
