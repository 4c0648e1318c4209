"""The ``alpa`` wheel: installing it beside the environment rather than into it, and finding it.

alpa 0.2.3 pins a jax and a jaxlib that no longer exist, so it cannot be an ordinary requirement.
It is unpacked, without its dependencies, into a folder of its own that only the solver's worker
process has on its path; ``pip check`` stays clean. ``python -m arena_jax.solver_setup`` does it.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from arena_jax.errors import ArenaError
from arena_jax.home import home

ALPA_VERSION = "0.2.3"
INSTALL_TIMEOUT_S = 600


def alpa_folder() -> Path | None:
    """The folder to put on the worker's path, or ``None`` when alpa is not installed."""
    return next((folder for folder in _candidates() if _installed(folder)), None)


def install_alpa(*, force: bool = False) -> Path:
    """Install the wheel with this interpreter's pip and return its folder.

    Unpacked under a temporary name and then renamed, so that an interrupted download leaves nothing
    that looks installed. Raises :class:`ArenaError` with pip's own last line when pip fails.
    """
    present = alpa_folder()
    if present is not None and not force:
        return present
    target = next((folder for folder in _candidates() if _writable(folder.parent)), None)
    if target is None:
        raise ArenaError(
            f"cannot write to any of {', '.join(str(folder.parent) for folder in _candidates())}",
            hint="point ARENA_JAX_HOME at a folder you own",
        )
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        unpacked = Path(scratch) / "alpa"
        _pip_install(unpacked)
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)
    return target


def _candidates() -> list[Path]:
    """Own folder of the virtual environment first, so that a clone stays self-contained."""
    inside = [Path(sys.prefix) / "solvers" / "alpa"] if sys.prefix != sys.base_prefix else []
    return [*inside, home() / "solvers" / "alpa"]


def _installed(folder: Path) -> bool:
    return (folder / f"alpa-{ALPA_VERSION}.dist-info").is_dir() and (folder / "alpa" / "__init__.py").is_file()


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _pip_install(target: Path) -> None:
    requirement = f"alpa=={ALPA_VERSION}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--target", str(target), requirement]
    by_hand = f"pip install --no-deps --target {_candidates()[0]} {requirement}"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ArenaError(
            f"pip did not install {requirement} within {INSTALL_TIMEOUT_S} s", hint=f"by hand: {by_hand}"
        ) from error
    if done.returncode or not _installed(target):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"exit code {done.returncode}"
        raise ArenaError(f"pip could not install {requirement}: {reason}", hint=f"by hand: {by_hand}")


def main() -> int:
    """Install, and say where to; exit code 1 with one message when that failed."""
    try:
        folder = install_alpa()
    except ArenaError as error:
        print(f"warning: {error}", file=sys.stderr)
        return error.exit_code
    print(f"alpa {ALPA_VERSION} in {folder}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
