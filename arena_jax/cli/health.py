"""The checks behind ``arena-jax doctor``. jax is only ever started in a process of its own."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from arena_jax import __version__
from arena_jax.cli.accelerators import Accelerator, find_accelerators
from arena_jax.deviceless.extras import installed, remedy, what_is_wrong
from arena_jax.errors import counted
from arena_jax.home import cache_sizes, home
from arena_jax.solver_setup import ALPA_VERSION, alpa_folder

JAX_RANGE = ((0, 10), (0, 13))
DEVICES_TIMEOUT_S = 180
_LIBRARIES = ("flax", "optax", "orbax-checkpoint", "mlflow", "scipy")
_LIST_DEVICES = """
import json, jax
print(json.dumps([[d.platform, getattr(d, "device_kind", "")] for d in jax.devices()]))
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: ``ok``; ``note`` (optional and absent); ``warning`` (works, but not as it could);
            ``broken`` (no run can work).
        detail: what was found.
        hint: how to get what is missing; empty when nothing is.
    """

    name: str
    status: str
    detail: str
    hint: str = ""


def checks() -> Iterator[Check]:
    """All checks, quick ones first."""
    yield Check(name="arena_jax", status="ok", detail=f"{__version__} on Python {platform.python_version()}")
    yield _jax()
    for name in _LIBRARIES:
        yield _library(name)
    yield from _devices()
    yield Check(name="engine highs", status="ok", detail=f"scipy {_version('scipy')} milp (the default)")
    yield _alpa()
    yield _compiler("cuda")
    yield _compiler("tpu")
    yield _ray()
    yield _home()
    for cache in cache_sizes():
        detail = f"{_bytes(cache.size_bytes)} in {counted(cache.num_files, 'file')}" if cache.num_files else "empty"
        yield Check(name=f"cache {cache.name}", status="ok", detail=f"{detail}, {cache.path}")


def unused_accelerator(platforms: set[str], accelerators: tuple[Accelerator, ...]) -> Check | None:
    """The warning due when this machine has an accelerator and jax, seeing ``platforms``, runs on CPU."""
    if not accelerators or platforms != {"cpu"}:
        return None
    found = accelerators[0]
    chosen = os.environ.get("JAX_PLATFORMS")
    if chosen == "cpu":
        hint = "unset JAX_PLATFORMS, which is set to cpu"
    else:
        hint = f"{pip_command()} install -U 'jax[{found.extra}]=={_version('jax')}'"
    return Check(
        name="accelerator", status="warning", detail=f"{found.description} is here, but jax runs on CPU", hint=hint
    )


def _jax() -> Check:
    jax, jaxlib = _version("jax"), _version("jaxlib")
    low, high = (".".join(map(str, bound)) for bound in JAX_RANGE)
    remedy = f"{pip_command()} install 'jax>={low},<{high}'"
    if jax is None or jaxlib is None:
        return Check(name="jax", status="broken", detail="not installed", hint=remedy)
    numbers = tuple(int(part) for part in re.findall(r"\d+", jax)[:2])
    if not JAX_RANGE[0] <= numbers < JAX_RANGE[1]:
        return Check(name="jax", status="broken", detail=f"{jax}; this release needs >={low},<{high}", hint=remedy)
    return Check(name="jax", status="ok", detail=f"{jax}, jaxlib {jaxlib}")


def _library(name: str) -> Check:
    found = _version(name)
    if found is None:
        return Check(name=name, status="broken", detail="not installed", hint=f"{pip_command()} install {name}")
    return Check(name=name, status="ok", detail=found)


def _devices() -> Iterator[Check]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LIST_DEVICES],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=DEVICES_TIMEOUT_S,
            check=False,
        )
        devices = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
    except subprocess.TimeoutExpired:
        devices, reason = None, f"no answer within {DEVICES_TIMEOUT_S} s"
    except (IndexError, ValueError):
        devices, reason = None, "no readable answer"
    if devices is None:
        yield Check(name="devices", status="broken", detail=f"jax finds none: {reason}")
        return
    kinds = sorted({f"{platform_name} ({kind})" for platform_name, kind in devices})
    yield Check(name="devices", status="ok", detail=f"{len(devices)} x {', '.join(kinds)}")
    warning = unused_accelerator({platform_name for platform_name, _ in devices}, find_accelerators())
    if warning is not None:
        yield warning


def _alpa() -> Check:
    folder = alpa_folder()
    if folder is not None:
        return Check(name="engine alpa", status="ok", detail=f"alpa {ALPA_VERSION} in {folder}")
    return Check(
        name="engine alpa",
        status="note",
        detail="not installed; the default engine does without it",
        hint="arena-jax doctor --install-alpa",
    )


def _compiler(platform_name: str) -> Check:
    """What `plan --aot` compiles with."""
    name, found, wrong = f"compiler {platform_name}", installed(platform_name), what_is_wrong(platform_name)
    if wrong:
        status = "note" if None in found.values() else "warning"
        return Check(name=name, status=status, detail=wrong, hint=remedy(platform_name, pip_command()))
    detail = ", ".join(f"{package} {number}" for package, number in found.items() if package != "jax-cuda12-pjrt")
    return Check(name=name, status="ok", detail=detail)


def _ray() -> Check:
    found = _version("ray")
    if found is None:
        hint = f"{pip_command()} install 'ray>=2.50,<3'"
        return Check(name="executor ray", status="note", detail="not installed", hint=hint)
    return Check(name="executor ray", status="ok", detail=found)


def _home() -> Check:
    folder = home()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        hint = "point ARENA_JAX_HOME at a folder you own"
        return Check(name="caches", status="warning", detail=f"{folder} cannot be written", hint=hint)
    return Check(name="caches", status="ok", detail=str(folder))


def pip_command() -> str:
    """The pip of this interpreter, as short as it can be typed here."""
    found = shutil.which("pip")
    if found is not None and Path(found).parent == Path(sys.executable).parent:
        return "pip"
    interpreter = Path(sys.executable)
    try:
        return f"{interpreter.relative_to(Path.cwd())} -m pip"
    except ValueError:
        return f"{interpreter} -m pip"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _bytes(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
