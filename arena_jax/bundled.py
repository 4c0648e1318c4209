"""Where the bundled models and recipes lie, and how a model file is loaded.

In a clone they are the top-level folders ``models/`` and ``recipes/``; an installed wheel carries them
inside the package. Either way they are loaded under names of our own, so that neither a user's own
``models`` package nor another distribution's can get in the way.
"""

import hashlib
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from arena_jax.errors import UsageError, nearest

_PACKAGE = Path(__file__).resolve().parent


def bundled_folder(kind: str) -> Path:
    """Return the folder of the bundled ``"models"`` or ``"recipes"``."""
    installed = _PACKAGE / "_bundled" / kind
    return installed if installed.is_dir() else _PACKAGE.parent / kind


def recipe_paths() -> dict[str, Path]:
    """Return the bundled recipes by name."""
    return {path.stem: path for path in sorted(bundled_folder("recipes").glob("*.yaml"))}


def model_path(name: str) -> Path:
    """Return the file of a bundled model; raise :class:`UsageError` naming the nearest."""
    # A file that defines no Config is a helper of the others, not a model.
    paths = {
        p.stem: p for p in bundled_folder("models").glob("*.py") if "class Config" in p.read_text(encoding="utf-8")
    }
    if name not in paths:
        raise UsageError(
            f"no model is called {name!r}{nearest(name, paths)}", hint=f"bundled: {', '.join(sorted(paths))}"
        )
    return paths[name]


def load_file(path: Path) -> ModuleType:
    """Import a Python file under a private name; files beside it can be imported relatively.

    The same file gives the same module object, so classes keep their identity.
    """
    path = path.resolve()
    if not path.is_file():
        raise UsageError(f"no file {str(path)!r}")
    package = _package_of(path.parent)
    return importlib.import_module(f"{package}.{path.stem}")


def load_function(reference: str) -> Callable[..., Any]:
    """Return what ``module:name`` or ``path/to/file.py:name`` names; it must be callable."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise UsageError(f"{reference!r} names no function", hint="write module:function or path/to/file.py:function")
    local = Path(place if place.endswith(".py") else place.replace(".", "/") + ".py")
    if place.endswith(".py") or (importlib.util.find_spec(place.partition(".")[0]) is None and local.is_file()):
        module = load_file(local)
    else:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not place.startswith(error.name):
                raise
            raise UsageError(
                f"no module {place!r} ({reference!r})", hint="install it, or name its file: path/to/file.py:function"
            ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{place!r} has no function {name!r}{nearest(name, vars(module))}")
    return function  # type: ignore[no-any-return]


def _package_of(folder: Path) -> str:
    """Register ``folder`` as a package under a name made from its path; return the name."""
    digest = hashlib.blake2b(str(folder).encode(), digest_size=6).hexdigest()
    name = f"_arena_jax_files_{digest}"
    if name not in sys.modules:
        spec = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[name] = importlib.util.module_from_spec(spec)
    return name
