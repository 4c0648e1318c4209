"""What came of compiling a program, kept by what decides it: its text, its target and the compilers' versions."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from arena_jax.compiler.hlo import Collective

# 2: collectives of the TPU compiler that several fusions share, and its scatters, are read as what they are.
_FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One program as a compiler made it.

    Attributes:
        argument_bytes, output_bytes, alias_bytes, temp_bytes: of one device; aliased bytes are both
            argument and output. All are 0 for a program that was refused.
        collectives: what it sends.
        compile_s: what compiling it took.
        missing_bytes: by how much the compiler found a device's memory too small; 0 where it fits.
        message: what the compiler said where it refused.
        output_specs: partition specs of all results, where each is one, as JSON: what depends on this
            program is lowered with them. ``None`` where some result lies otherwise.
    """

    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temp_bytes: int = 0
    collectives: tuple[Collective, ...] = ()
    compile_s: float = 0.0
    missing_bytes: int = 0
    message: str = ""
    output_specs: tuple[tuple[Any, ...], ...] | None = None

    @property
    def fresh_bytes(self) -> int:
        """Bytes that running it takes beside its arguments."""
        return self.output_bytes - self.alias_bytes + self.temp_bytes

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Compiled":
        """Read what :meth:`to_json` wrote; raise ``KeyError``, ``TypeError`` or ``ValueError`` otherwise."""
        values = dict(data)
        values["collectives"] = tuple(Collective(**c) for c in values["collectives"])
        specs = values["output_specs"]
        values["output_specs"] = None if specs is None else tuple(_spec(spec) for spec in specs)
        compiled = cls(**values)
        for name in ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "missing_bytes"):
            if type(getattr(compiled, name)) is not int:
                raise TypeError(name)
        return compiled


def fingerprint(text: str, target: str, versions: Mapping[str, str], options: Mapping[str, Any]) -> str:
    """32 hex digits that name a program, what it is compiled for, and with what."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (text, target, json.dumps([dict(versions), dict(options)], sort_keys=True)):
        digest.update(hashlib.blake2b(part.encode(), digest_size=32).digest())
    return digest.hexdigest()


class ProgramStore:
    """A folder of one file a program; any number of processes may read and write it.

    A file that does not read is as good as none: the program is compiled again, and the file replaced.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, name: str) -> Compiled | None:
        try:
            data = json.loads(self._path(name).read_text(encoding="utf-8"))
            if data["format"] != _FORMAT or data["fingerprint"] != name:
                return None
            return Compiled.from_json(data["compiled"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def put(self, name: str, compiled: Compiled) -> None:
        """Keep a program; a folder that cannot be written costs the next call time, and this one nothing."""
        path = self._path(name)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        text = json.dumps({"format": _FORMAT, "fingerprint": name, "compiled": compiled.to_json()})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / name[:2] / f"{name}.json"


def _spec(data: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(tuple(dim) if isinstance(dim, list) else dim for dim in data)
