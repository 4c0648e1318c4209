"""Who makes a job's plan index: a Protocol, since it takes seconds and happens beside the loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from arena_jax.grid import Allocation
from arena_jax.service.estimates import Index
from arena_jax.service.job import Job


@dataclass(frozen=True, kw_only=True)
class Indexing:
    """How far an index is.

    Attributes:
        index: when it is done.
        error: why there will be none.
        said: what is being done, for a person.
    """

    index: Index | None = None
    error: str = ""
    said: str = ""


class Indexer(Protocol):
    """Plans jobs. What was begun and not finished when the service died is begun again."""

    def key(self, job: Job) -> str:
        """What the job's index is filed under: equal for jobs that plan alike."""

    def look(self, job: Job, allocations: Sequence[Allocation]) -> Indexing:
        """Begin, or see how far it is; called again and again until there is an index or an error."""

    def drop(self, job: Job) -> None:
        """It is not wanted any more."""
