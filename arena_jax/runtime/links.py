"""How values get from one stage to another, in this process or in another one.

The processes of a pipeline have a jax runtime each and run the same program over all stages: every one comes to
every move, in the same order, and does its part of it. A value of a stage that is elsewhere is ``None``.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from arena_jax.errors import PlanError
from arena_jax.runtime.peers import Board

# A name is checked once; the sender's word is on the board when the receiver asks, or soon after.
_WORD_S = 600.0


class Links(Protocol):
    """Moves values between stages."""

    @property
    def leads(self) -> bool:
        """Whether :meth:`fetch` brings values to this process."""

    def here(self, stage: int) -> bool:
        """Whether a stage is in this process."""

    def move(self, name: str, value: Any, source: int, target: int, struct: jax.ShapeDtypeStruct) -> Any:
        """The value on ``target``, under the sharding of ``struct``; ``None`` where that is elsewhere.

        Args:
            name: what it is, the same at both ends and at every step.
            value: on ``source``; ``None`` where that is elsewhere.
        """

    def move_all(
        self, names: Sequence[str], values: Sequence[Any], sources: Sequence[int], target: int, structs: Sequence[Any]
    ) -> list[Any]:
        """:meth:`move` of several values to one stage."""

    def spread(self, name: str, values: Sequence[Any], source: int, structs: Sequence[Any]) -> list[Any]:
        """Values of a stage in every process, on one device where they came from elsewhere."""

    def fetch(self, name: str, value: Any, source: int, struct: jax.ShapeDtypeStruct) -> Any:
        """A value of a stage in the leader, on one device where it came from elsewhere; ``None`` in the others.

        The value may be donated as soon as this returns.
        """


class LocalLinks:
    """All stages are in this process."""

    @property
    def leads(self) -> bool:
        """See :class:`Links`."""
        return True

    def here(self, stage: int) -> bool:
        """See :class:`Links`."""
        return True

    def move(self, name: str, value: Any, source: int, target: int, struct: jax.ShapeDtypeStruct) -> Any:
        """See :class:`Links`."""
        return jax.device_put(value, struct.sharding)

    def move_all(
        self, names: Sequence[str], values: Sequence[Any], sources: Sequence[int], target: int, structs: Sequence[Any]
    ) -> list[Any]:
        """See :class:`Links`."""
        moved: list[Any] = jax.device_put(list(values), [s.sharding for s in structs])
        return moved

    def spread(self, name: str, values: Sequence[Any], source: int, structs: Sequence[Any]) -> list[Any]:
        """See :class:`Links`."""
        return list(values)

    def fetch(self, name: str, value: Any, source: int, struct: jax.ShapeDtypeStruct) -> Any:
        """See :class:`Links`."""
        return value


class WireLinks:
    """Stages in several processes, and jax's transfer servers between them.

    A transfer between unlike shard layouts delivers wrong data without an error. So on the wire a value always
    lies whole on one device: the sender gathers it, the receiver spreads it, each inside its own runtime, and
    both compare shape, type and layout before the first transfer of each name. A receiver waits for as long as
    its peer lives; who watches the group ends it when the peer does not.

    Args:
        process_of: the process of each stage.
        rank: this process.
        board: where the processes tell each other their addresses.
        host: at which this process can be reached.
    """

    def __init__(self, process_of: Sequence[int], rank: int, board: Board, *, host: str = "127.0.0.1") -> None:
        from jax.experimental import transfer

        self._process_of = tuple(process_of)
        self._rank = rank
        self._count = max(process_of) + 1
        self._board = board
        self._device = jax.local_devices()[0]
        self._server = transfer.start_transfer_server(self._device.client, f"{host}:0", [f"{host}:0"] * 4)
        board.set(f"wire/{rank}", self._server.address())
        self._connections: dict[int, Any] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._checked: set[tuple[int, int, str]] = set()
        self._copy = jax.jit(jnp.copy)

    @property
    def leads(self) -> bool:
        """See :class:`Links`."""
        return self._rank == 0

    def here(self, stage: int) -> bool:
        """See :class:`Links`."""
        return self._process_of[stage] == self._rank

    def move(self, name: str, value: Any, source: int, target: int, struct: jax.ShapeDtypeStruct) -> Any:
        """See :class:`Links`."""
        sender, receiver = self._process_of[source], self._process_of[target]
        if sender == receiver:
            return jax.device_put(value, struct.sharding) if sender == self._rank else None
        moved = self._transfer(name, value, sender, receiver, struct)
        return None if moved is None else jax.device_put(moved, struct.sharding)

    def move_all(
        self, names: Sequence[str], values: Sequence[Any], sources: Sequence[int], target: int, structs: Sequence[Any]
    ) -> list[Any]:
        """See :class:`Links`."""
        moves = zip(names, values, sources, structs, strict=True)
        return [self.move(name, value, source, target, struct) for name, value, source, struct in moves]

    def spread(self, name: str, values: Sequence[Any], source: int, structs: Sequence[Any]) -> list[Any]:
        """See :class:`Links`."""
        sender = self._process_of[source]
        out = list(values)
        for receiver in range(self._count):
            if receiver == sender:
                continue
            for i, struct in enumerate(structs):
                moved = self._transfer(f"{name} {i}", values[i], sender, receiver, struct)
                out[i] = values[i] if moved is None else moved
        return out

    def fetch(self, name: str, value: Any, source: int, struct: jax.ShapeDtypeStruct) -> Any:
        """See :class:`Links`."""
        sender = self._process_of[source]
        if sender == 0:
            return value if self._rank == 0 else None
        if sender == self._rank:
            value = self._copy(value)
        return self._transfer(name, value, sender, 0, struct)

    def _transfer(self, name: str, value: Any, sender: int, receiver: int, struct: jax.ShapeDtypeStruct) -> Any:
        if self._rank not in (sender, receiver):
            return None
        number = self._sent.get((sender, receiver), 0)
        self._sent[sender, receiver] = number + 1
        wire = SingleDeviceSharding(self._device)
        key = (((sender << 8) | receiver) << 44) | number
        if self._rank == sender:
            value = jax.device_put(value, wire)
            self._check(name, sender, receiver, value)
            self._server.await_pull(key, [value])
            return None
        expected = jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=wire)
        self._check(name, sender, receiver, expected)
        (moved,) = self._connection(sender).pull(key, [expected])
        return moved

    def _check(self, name: str, sender: int, receiver: int, value: Any) -> None:
        """Compare what is sent with what is expected, the first time that a name comes up."""
        link = (sender, receiver, name)
        if link in self._checked:
            return
        self._checked.add(link)
        indices = value.sharding.devices_indices_map(tuple(value.shape)).values()
        mine = f"{value.dtype}{list(value.shape)} in shards {[str(index) for index in indices]}"
        key = f"wire/{sender}/{receiver}/{name}"
        if self._rank == sender:
            self._board.set(key, mine)
            return
        theirs = self._board.get(key, _WORD_S)
        if theirs != mine:
            raise PlanError(f"stages differ in {name!r}: process {sender} sends {theirs}, {receiver} expects {mine}")

    def _connection(self, sender: int) -> Any:
        if sender not in self._connections:
            address = self._board.get(f"wire/{sender}", _WORD_S)
            if address is None:
                raise PlanError(f"process {sender} opened no transfer server")
            self._connections[sender] = self._server.connect(address)
        return self._connections[sender]
