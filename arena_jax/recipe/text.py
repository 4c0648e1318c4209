"""The text of recipes: a YAML dialect without YAML 1.1's surprises, and ``key=value`` overrides.

PyYAML reads ``1e-4`` as a string, ``off`` as false and ``1:30`` as ninety. Here numbers are what
Python calls numbers, only ``true`` and ``false`` are booleans, and everything else is text.
"""

import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import yaml

from arena_jax.errors import RecipeError


class _Loader(yaml.SafeLoader):
    """SafeLoader with our own scalars, and duplicate keys refused."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_int(self, node: yaml.ScalarNode) -> int:
        return int(self.construct_scalar(node).replace("_", ""))

    def construct_float(self, node: yaml.ScalarNode) -> float:
        return float(self.construct_scalar(node).replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))


_FRACTION = r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern in {
    "bool": r"true|false",
    "int": r"[-+]?[0-9][0-9_]*",
    "float": _FRACTION + r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.?(?:inf|nan)",
    "null": r"~|null|",
    "merge": r"<<",
}.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), None)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_float)


def parse_yaml(text: str, origin: str) -> Any:
    """Return the value of a YAML text; raise :class:`RecipeError` with the line of the fault."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise RecipeError(f"{origin}{where}: {problem}", errors=[f"{origin}{where}: {problem}"]) from error


def dump_yaml(value: Mapping[str, Any]) -> str:
    """Return YAML text that :func:`parse_yaml` reads back to an equal value."""
    return yaml.safe_dump(dict(value), sort_keys=False, allow_unicode=True, width=100)


def parse_override(text: str) -> tuple[tuple[str, ...], Any]:
    """Split ``a.b=value`` into its key path and its typed value."""
    key, equals, value = text.partition("=")
    path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        raise RecipeError(
            f"override {text!r} is not key=value",
            errors=[f"override {text!r} is not key=value"],
            hint="write plan.dp=2",
        )
    return path, parse_yaml(value, origin=f"override {text!r}")


def merge(values: Mapping[str, Any], overrides: Sequence[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    """Return a copy of ``values`` with each override set; sections that are missing are made."""
    merged = _copy(values)
    for path, value in overrides:
        section = merged
        for depth, part in enumerate(path[:-1]):
            inner = section.get(part)
            if inner is None:
                inner = section[part] = {}
            elif not isinstance(inner, dict):
                fault = f"{'.'.join(path)}: {'.'.join(path[: depth + 1])} is the value {inner!r}, not a section"
                raise RecipeError(fault, errors=[fault])
            section = inner
        section[path[-1]] = value
    return merged


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(inner) for key, inner in value.items()}
    return list(value) if isinstance(value, list) else value
