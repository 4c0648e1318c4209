"""The packages that compile for accelerators without one, and how to get them."""

import re
from importlib.metadata import PackageNotFoundError, version

from arena_jax.errors import ArenaError

# nvcc brings ptxas, without which programs for V100 do not compile.
PACKAGES = {
    "cuda": ("jax-cuda12-plugin", "jax-cuda12-pjrt", "nvidia-cuda-nvcc-cu12"),
    "tpu": ("libtpu",),
}
EXTRAS = {"cuda": "cuda-aot", "tpu": "tpu-aot"}


class CompilerMissing(ArenaError):
    """The compiler for a platform is not installed, or not in jax's version."""


def installed(platform: str) -> dict[str, str | None]:
    """Versions of a platform's compiler packages; ``None`` where one is missing."""
    return {name: _version(name) for name in PACKAGES[platform]}


def what_is_wrong(platform: str) -> str:
    """What keeps programs from being compiled for a platform; empty where nothing does."""
    found = installed(platform)
    missing = [name for name, number in found.items() if number is None]
    if missing:
        return f"missing {', '.join(missing)}"
    jaxlib = _version("jaxlib")
    for name in ("jax-cuda12-plugin", "jax-cuda12-pjrt"):
        if name in found and found[name] != jaxlib:
            return f"{name.removeprefix('jax-cuda12-')} {found[name]} beside jaxlib {jaxlib}"
    return ""


def remedy(platform: str, pip: str = "pip") -> str:
    """The command that installs a platform's compiler; the CUDA plugins must have jaxlib's own version."""
    jaxlib = _version("jaxlib")
    if platform == "cuda":
        return f"{pip} install jax-cuda12-plugin=={jaxlib} jax-cuda12-pjrt=={jaxlib} nvidia-cuda-nvcc-cu12"
    return f"{pip} install 'jax[tpu]=={_version('jax')}'"


def versions(platform: str) -> dict[str, str]:
    """Versions that decide what a program compiles to.

    Raises:
        CompilerMissing: there is no compiler for the platform.
    """
    wrong = what_is_wrong(platform)
    if wrong:
        raise CompilerMissing(
            f"there is no {platform} compiler here: {wrong}",
            hint=f"{remedy(platform)} (the extra [{EXTRAS[platform]}]); without it the analytic estimate stands",
        )
    found = {name: number or "" for name, number in installed(platform).items()}
    return found | {"jax": _version("jax") or "", "jaxlib": _version("jaxlib") or ""}


def _version(name: str) -> str | None:
    try:
        return re.sub(r"\+.*", "", version(name))
    except PackageNotFoundError:
        return None
