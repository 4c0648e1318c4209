"""The keys of a model, read from its file without importing it, since that would import jax.

A model file's ``Config`` is a dataclass of plain values. Only that class and the standard-library
imports it may use are executed, so ``validate`` gives the model's own checks and stays instant.
"""

import ast
import dataclasses
import sys
import typing
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, create_model

from arena_jax.errors import ModelError


@lru_cache(maxsize=64)
def config_class(path: Path) -> type[Any]:
    """Return the ``Config`` dataclass of a model file."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, filename=str(path))
    except OSError as error:
        raise ModelError(f"cannot read the model file {str(path)!r}: {error.strerror}") from error
    except SyntaxError as error:
        raise ModelError(f"{str(path)!r} is not Python, line {error.lineno}: {error.msg}") from error
    chosen = [node for node in tree.body if _is_standard_import(node) or _is_config(node)]
    if not any(_is_config(node) for node in chosen):
        raise ModelError(f"{str(path)!r} defines no class Config", hint="add a frozen dataclass of the model's sizes")
    # dataclass() looks the class's module up by name, so it must be one that exists.
    namespace: dict[str, Any] = {"__name__": "builtins"}
    try:
        exec(compile(ast.Module(chosen, []), str(path), "exec"), namespace)
    except Exception as error:  # whatever the user's class body raises
        raise ModelError(
            f"Config in {str(path)!r}: {type(error).__name__}: {error}",
            hint="let Config use the standard library only; it is read without importing the file",
        ) from error
    found = namespace["Config"]
    if not dataclasses.is_dataclass(found):
        raise ModelError(f"Config in {str(path)!r} is no dataclass", hint="decorate it with @dataclass(frozen=True)")
    found.__annotations__ = typing.get_type_hints(found, globalns=namespace)
    return cast("type[Any]", found)


@lru_cache(maxsize=64)
def config_schema(path: Path) -> type[BaseModel]:
    """Return a strict pydantic model with the fields of the file's ``Config``."""
    found = config_class(path)
    definitions: dict[str, Any] = {}
    for field in dataclasses.fields(found):
        if field.default is not dataclasses.MISSING:
            default: Any = field.default
        else:
            default = ... if field.default_factory is dataclasses.MISSING else field.default_factory()
        definitions[field.name] = (found.__annotations__[field.name], default)
    settings = ConfigDict(extra="forbid", strict=True, frozen=True)
    return create_model("Config", __config__=settings, **definitions)


def model_config(path: Path, values: Mapping[str, Any]) -> Any:
    """Return the file's ``Config`` with ``values``, checked.

    Raises:
        pydantic.ValidationError: unknown keys and wrong types, all of them.
        ValueError: what the class's own ``__post_init__`` refuses.
    """
    return config_class(path)(**dict(checked_values(path, values)))


def checked_values(path: Path, values: Mapping[str, Any]) -> BaseModel:
    """The values alone, each checked, without what ``__post_init__`` says of them together.

    Raises:
        pydantic.ValidationError: as :func:`model_config`.
    """
    return config_schema(path)(**{key: _tuples(value) for key, value in values.items()})


def _tuples(value: Any) -> Any:
    """YAML has lists only; a frozen dataclass wants tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _is_config(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and node.name == "Config"


def _is_standard_import(node: ast.stmt) -> bool:
    if isinstance(node, ast.Import):
        return all(alias.name.partition(".")[0] in sys.stdlib_module_names for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        return node.module.partition(".")[0] in sys.stdlib_module_names
    return False
