"""The service as one object: state, socket, page and loop, held together by a lock on the state folder."""

import fcntl
import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arena_jax.errors import ArenaError, UsageError
from arena_jax.scheduler import Cluster, make_policy
from arena_jax.service.executor import Executor
from arena_jax.service.indexing import Indexer
from arena_jax.service.queues import Queues
from arena_jax.service.reconcile import Reconciler
from arena_jax.service.requests import Requests
from arena_jax.service.rules import Rules
from arena_jax.service.server import Server
from arena_jax.service.store import Store
from arena_jax.service.web import Web

TICK_S = 0.25
# After a tick that failed, as on a full disk, the state is read anew and the next tick made after so long.
_RETRY_S = 2.0


@dataclass(kw_only=True)
class Options:
    """How to serve.

    Attributes:
        state: folder of everything that is kept.
        cluster, queues: of the cluster file.
        policy: name of the policy.
        rules: see :class:`Rules`; the policy's own round replaces ``round_s`` where it has one.
        port: of the page and the metrics on 127.0.0.1; ``None`` for none, 0 for any.
        label: what every view says of the cluster, as that its speeds are nominal.
    """

    state: Path
    cluster: Cluster
    queues: Queues = field(default_factory=Queues)
    policy: str = "arena"
    rules: Rules = field(default_factory=Rules)
    port: int | None = None
    label: str = ""


class Service:
    """Serves from :meth:`start` until :meth:`close`; jobs go on without it.

    Args:
        make: executor and indexer, made once the state folder is this process's own.
        note: told what happens, one line at a time.
    """

    def __init__(
        self,
        options: Options,
        make: Callable[[Store], tuple[Executor, Indexer]],
        *,
        clock: Callable[[], float] = time.time,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.options, self._make, self._clock, self._note = options, make, clock, note
        self._stack = ExitStack()
        self._stop = threading.Event()
        self._failed = ""
        self.url = ""

    def start(self) -> None:
        """Take the state folder, open the socket and the page; raise :class:`UsageError` where one cannot be had."""
        options = self.options
        make_policy(options.policy)  # an unknown one is refused before anything is touched
        self._lock()
        self.store = Store(options.state / "state.sqlite")
        self.executor, self.indexer = self._make(self.store)
        self.loop = self._reconciler()
        if options.port is not None:
            web = Web(self.store, options, port=options.port)
            self._stack.callback(web.close)
            self.url = web.url
        about = {"policy": options.policy, "label": options.label, "page": self.url}
        requests = Requests(
            store=self.store, cluster=options.cluster, executor=self.executor, clock=self._clock, about=about
        )
        server = Server(options.state, requests.answer, note=self._note)
        self._stack.callback(server.close)

    def run(self) -> None:
        """Tick until :meth:`stop`."""
        while not self._stop.is_set():
            self.tick()
            self._stop.wait(_RETRY_S if self._failed else TICK_S)

    def tick(self) -> None:
        """One tick. What goes wrong is noted, and the state read anew: what was not committed did not happen."""
        try:
            if self._failed:
                self.loop = self._reconciler()
            self.loop.tick()
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if text != self._failed:
                if not isinstance(error, ArenaError):  # a bug of ours; jobs go on, and the log says where it is
                    self._note(traceback.format_exc())
                self._note(f"nothing is done until this is over: {text}")
            self._failed = text
            return
        if self._failed:
            self._note("goes on")
            self._failed = ""

    def stop(self) -> None:
        """Let :meth:`run` return; may be called from a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Close socket and page, and let go of the state folder. Jobs are left alone."""
        self._stack.close()

    def _reconciler(self) -> Reconciler:
        options = self.options
        policy, round_s = make_policy(options.policy)
        rules = options.rules
        if round_s and not rules.round_s:
            rules = Rules(**{**rules.__dict__, "round_s": round_s})
        return Reconciler(
            store=self.store,
            cluster=options.cluster,
            policy=policy,
            executor=self.executor,
            indexer=self.indexer,
            clock=self._clock,
            queues=options.queues,
            rules=rules,
            note=self._note,
        )

    def _lock(self) -> None:
        state = self.options.state
        try:
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
            if state.stat().st_uid != os.geteuid():
                raise UsageError(f"{str(state)!r} belongs to user {state.stat().st_uid}", hint="use another --state")
            os.chmod(state, 0o700)
            lock = os.open(state / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f"cannot use the state folder {str(state)!r}: {error.strerror}", hint="choose another with --state"
            ) from error
        self._stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._stack.close()
            raise UsageError(
                f"another service runs with its state in {str(state)!r}",
                hint="use that one, or another --state folder",
            ) from None


def facts(service: Service) -> dict[str, Any]:
    """What ``serve --json`` says when it begins."""
    return {
        "state": str(service.options.state),
        "policy": service.options.policy,
        "page": service.url,
        "num_devices": service.options.cluster.num_devices,
    }
