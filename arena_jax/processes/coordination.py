"""jax's coordination service: the meeting point of a group of processes.

jax itself starts the service in process 0, whose death then takes the others along. Here whoever owns the
group hosts it. The classes are jax's own internals (0.10 to 0.12); nothing else in the package touches them.
A service serves one group, once: the next group gets another.
"""

import os
import socket
from contextlib import suppress
from typing import Any

from arena_jax.errors import ArenaError
from arena_jax.processes.launch import free_port

# Seconds without a sign of life after which the service counts a process as lost, which ends the survivors. A
# supervisor sees a death long before, and knows when the whole machine stood still.
SUPERVISED_HEARTBEAT_S, ALONE_HEARTBEAT_S = 600, 10
_SHUTDOWN_TIMEOUT_S = 10


class Service:
    """Serves one group.

    Args:
        num_processes: of the group; nobody gets further than :class:`Board` before all are there.
        address: ``host:port`` to listen at; by default a free port of this machine.
        supervised: whether somebody else deals with deaths; otherwise that of one ends the others.
    """

    def __init__(self, num_processes: int, address: str | None = None, *, supervised: bool = True) -> None:
        _hush()
        from jaxlib import _jax  # type: ignore[attr-defined]

        self.address = address or f"127.0.0.1:{free_port()}"
        try:
            self._service: Any = _jax.get_distributed_runtime_service(
                self.address,
                num_processes,
                heartbeat_timeout=SUPERVISED_HEARTBEAT_S if supervised else ALONE_HEARTBEAT_S,
                shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
                recoverable=supervised,
            )
        except Exception as error:
            raise ArenaError(f"cannot serve a group of processes at {self.address}: {error}") from error

    def close(self) -> None:
        """Stop serving. Whoever is still connected loses the connection."""
        service, self._service = self._service, None
        if service is not None:
            with suppress(Exception):
                service.shutdown()


class Board:
    """A key-value store that all processes of a group share; connecting waits for all of them.

    Values are short strings, written once.
    """

    def __init__(
        self, address: str, rank: int, num_processes: int, *, supervised: bool = True, timeout_s: int = 300
    ) -> None:
        from jaxlib import _jax  # type: ignore[attr-defined]

        self._address, self._rank, self._num_processes = address, rank, num_processes
        self._client: Any = _jax.get_distributed_runtime_client(
            address,
            rank,
            init_timeout=timeout_s,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
            heartbeat_timeout=SUPERVISED_HEARTBEAT_S if supervised else ALONE_HEARTBEAT_S,
            use_compression=True,
        )
        try:
            self._client.connect()
        except Exception as error:
            raise ArenaError(
                f"process {rank} of {num_processes} found no coordinator at {address}: {error}",
                hint="all processes of the group must be started, and reach that address",
            ) from error

    def join_runtime(self) -> None:
        """Let jax in this process see the devices of the whole group; before jax looks for any."""
        import jax
        from jax._src import distributed

        state = distributed.global_state
        state.client = self._client
        state.process_id, state.num_processes = self._rank, self._num_processes
        state.coordinator_address = self._address
        jax.config.update("jax_cpu_collectives_implementation", "gloo")

    def own_host(self) -> str:
        """The address of this machine on its way to the coordinator."""
        host, _, port = self._address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))  # sends nothing
            found = str(probe.getsockname()[0])
        return f"[{found}]" if ":" in found else found

    def set(self, key: str, value: str) -> None:
        """Write a value for all to see."""
        self._client.key_value_set(key, value)

    def get(self, key: str, timeout_s: float) -> str | None:
        """Wait for a value; ``None`` when the time is over."""
        try:
            return str(self._client.blocking_key_value_get(key, max(1, int(timeout_s * 1000))))
        except Exception as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise

    def peek(self, key: str) -> str | None:
        """A value that may not be there yet."""
        try:
            return str(self._client.key_value_try_get(key))
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def delete(self, key: str) -> None:
        """Forget a value that all have seen."""
        self._client.key_value_delete(key)

    def leave(self) -> None:
        """Part in peace: wait for the others, so that none takes this for a death."""
        with suppress(Exception):
            self._client.shutdown()


def _hush() -> None:
    """Only errors from the native library, which otherwise tells of every connection; before it is loaded."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
