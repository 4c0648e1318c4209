"""Finding and loading recipes: by bundled name, by path, or as a Python function."""

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from arena_jax.bundled import model_path, recipe_paths
from arena_jax.errors import RecipeError, UsageError, nearest
from arena_jax.recipe.checks import cross_checks
from arena_jax.recipe.model_config import checked_values, config_schema, model_config
from arena_jax.recipe.schema import Recipe
from arena_jax.recipe.text import merge, parse_override, parse_yaml

_FUNCTION = re.compile(r"[^:\s]+:[A-Za-z_]\w*")
# From this likeness on, a key of another section may be what was meant.
_LIKE = 0.7
_NEEDED = ("model", "global_batch", "steps")

# Values that name files; in a recipe they are relative to it, in an override to the working folder.
_PATHS = (("model", "file"), ("data", "path"), ("data", "files"), ("data", "function"), ("loss",), ("function",))


@dataclass(frozen=True, kw_only=True)
class RecipeInfo:
    """A bundled recipe as ``arena-jax ls`` lists it."""

    name: str
    path: Path
    summary: str


def find_recipes() -> list[RecipeInfo]:
    """Return the bundled recipes, found on disk, by name."""
    found = []
    for name, path in recipe_paths().items():
        # Only the top level is wanted, and parsing every recipe in full would be felt in `ls`.
        match = re.search(r"^summary:\s*(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        summary = str(parse_yaml(match[1], str(path))) if match else ""
        found.append(RecipeInfo(name=name, path=path, summary=summary))
    return found


def recipe_text(name_or_path: str) -> tuple[Path, str]:
    """Return the file of a recipe and its text as written."""
    path = _find(name_or_path)
    try:
        return path, path.read_text(encoding="utf-8")
    except OSError as error:
        raise _single(f"cannot read the recipe {name_or_path!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise _single(f"the recipe {name_or_path!r} is not UTF-8 text") from error


def load_recipe(name_or_path: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe with its overrides applied, checked as far as that needs no jax.

    Args:
        name_or_path: a bundled name, the path of a YAML file, or ``module:function``.
        overrides: ``key=value`` texts, dotted and typed.

    Raises:
        RecipeError: with every fault found in ``errors``.
    """
    values: Any
    if _FUNCTION.fullmatch(name_or_path) and not Path(name_or_path).exists():
        values = {"name": name_or_path.rpartition(":")[2], "function": _absolute(name_or_path, Path.cwd())}
    else:
        path, text = recipe_text(name_or_path)
        values = parse_yaml(text, origin=str(path))
        if not isinstance(values, dict):
            raise _single(f"{str(path)!r} holds no recipe: the top level must be keys and values")
        values = {"name": path.stem, **_with_absolute_paths(values, path.resolve().parent)}
    return recipe_from_mapping(values, overrides)


def recipe_from_mapping(values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of plain nested values; see :func:`load_recipe`."""
    faults: list[str] = []
    parsed: list[tuple[tuple[str, ...], Any]] = []
    for text in overrides:
        try:
            path, value = parse_override(text)
            parsed.append((path, _absolute(value, Path.cwd()) if path in _PATHS else value))
            values = merge(values, parsed[-1:])
        except RecipeError as error:
            faults += error.errors
    recipe, more, faulty = _validate(values)
    faults += more
    if recipe is not None:
        config, more = _check_model(recipe)
        faults += more
        faults += [text for keys, text in cross_checks(recipe, config) if faulty.isdisjoint(keys)]
    if faults or recipe is None:
        name = values.get("name", "?")
        lines = "\n".join(f"  - {fault}" for fault in faults)
        raise RecipeError(f"recipe {name!r} has {len(faults)} fault{'s'[: len(faults) != 1]}:\n{lines}", errors=faults)
    return recipe


def _find(name_or_path: str) -> Path:
    known = recipe_paths()
    if name_or_path in known:
        return known[name_or_path]
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        if Path(name_or_path).is_file():
            return Path(name_or_path)
        raise _single(f"no recipe file {name_or_path!r}{nearest(Path(name_or_path).stem, known)}")
    raise _single(
        f"no recipe is called {name_or_path!r}{nearest(name_or_path, known)}",
        hint="`arena-jax ls` lists them; a path needs a slash or ends in .yaml",
    )


def _validate(values: Mapping[str, Any]) -> tuple[Recipe | None, list[str], set[str]]:
    """Check the sections; go on without the faulty values so that later checks still run.

    Returns the recipe (``None`` when nothing is left to check), the faults and their dotted keys.
    """
    faults: list[str] = []
    faulty: set[str] = set()
    if not values.get("function"):
        for key in _NEEDED:
            if values.get(key) is None:
                faults.append(f"{key}: missing")
                faulty.add(key)
    values = merge(values, [])
    for _ in range(2):
        try:
            return Recipe.model_validate(values), faults, faulty
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                location = _location(Recipe, fault["loc"])
                key = ".".join(location)
                if key not in faulty:
                    faulty.add(key)
                    faults.append(f"{key}: {_words(Recipe, location, fault, _all_keys(values))}")
                _remove(values, location)
    return None, faults, faulty


def _check_model(recipe: Recipe) -> tuple[Any, list[str]]:
    """Check ``model.*`` against the model's own Config; return it, or ``None``, and the faults."""
    section = recipe.model
    if recipe.function and section == Recipe.model_fields["model"].default:
        return None, []
    if (section.name is None) == (section.file is None):
        return None, ["model: name a bundled model (model.name) or a file of your own (model.file), one of the two"]
    try:
        path = model_path(section.name) if section.name else Path(str(section.file))
        schema = config_schema(path)
    except UsageError as error:
        return None, [f"model.{'name' if section.name else 'file'}: {error.message}"]
    values = section.config
    faults: list[str] = []
    for _ in range(2):
        try:
            if section.name:
                too_small = _too_small(checked_values(path, values))
                if too_small:
                    return None, [*faults, *too_small]
            return model_config(path, values), faults
        except ValidationError as error:
            for fault in error.errors(include_url=False):
                location = _location(schema, fault["loc"])
                line = f"model.{'.'.join(location)}: {_words(schema, location, fault, _keys_of(Recipe))}"
                if line not in faults:
                    faults.append(line)
                _remove(values, location[:1])
        except (ValueError, ArithmeticError) as error:
            # The sizes contradict one another; each alone is still good for further checks.
            return checked_values(path, values), [*faults, f"model: {error}"]
    return None, faults


def _too_small(config: BaseModel) -> list[str]:
    """Whole numbers of the bundled models are sizes and counts."""
    sizes = {key: value for key, value in config if type(value) is int}
    return [f"model.{key}: {value}, and 1 is the least" for key, value in sizes.items() if value < 1]


def _location(schema: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[str, ...]:
    """Drop what pydantic appends to a place for the members of a union."""
    kept: list[str] = []
    inner: Any = schema
    for part in loc:
        if inner is None and not isinstance(part, int):
            break
        kept.append(str(part))
        field = inner.model_fields.get(part) if inner is not None else None
        annotation = field.annotation if field is not None else None
        inner = annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
        if field is None and not isinstance(part, int):
            break
    return tuple(kept)


def _words(schema: type[BaseModel], location: tuple[str, ...], fault: Any, elsewhere: Collection[str]) -> str:
    """Say what is wrong with one value, with the nearest key for an unknown one.

    ``elsewhere`` are dotted keys of the whole recipe, for a key that was written in the wrong section.
    """
    if fault["type"] == "extra_forbidden":
        inner: Any = schema
        for part in location[:-1]:
            inner = inner.model_fields[part].annotation
        return f"unknown key{_nearest_key(location[-1], inner.model_fields, elsewhere)}"
    received = fault["input"]
    if fault["type"] == "missing":
        return "missing"
    if fault["type"] == "literal_error":
        hint = nearest(str(received), re.findall(r"'([^']*)'", fault["ctx"]["expected"]))
        return f"must be {fault['ctx']['expected']}, got {received!r}{hint}"
    message = fault["msg"].removeprefix("Input ").removeprefix("should ")
    return f"should {message}, got {received!r}"


def _nearest_key(name: str, here: Collection[str], elsewhere: Collection[str]) -> str:
    """The nearest key of the section, unless one of another section is nearer."""

    def likeness(key: str) -> float:
        return SequenceMatcher(None, name, key.rpartition(".")[2]).ratio()

    far = max(elsewhere, key=likeness, default="")
    if likeness(far) > max(map(likeness, here), default=0.0) and likeness(far) >= _LIKE:
        return f" (did you mean {far!r}?)"
    return nearest(name, here)


def _keys_of(schema: type[BaseModel]) -> list[str]:
    """The dotted keys inside the sections of a schema."""
    keys = []
    for name, field in schema.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            keys += [f"{name}.{key}" for key in inner.model_fields]
    return keys


def _all_keys(values: Mapping[str, Any]) -> list[str]:
    """The dotted keys of a recipe, those of its model included where that can be read."""
    keys = _keys_of(Recipe)
    model = values.get("model")
    if isinstance(model, Mapping):
        name, file = model.get("name"), model.get("file")
        with suppress(UsageError):
            path = model_path(str(name)) if name else Path(str(file))
            keys += [f"model.{key}" for key in config_schema(path).model_fields]
    return keys


def _remove(values: dict[str, Any], location: tuple[str, ...]) -> None:
    inner: Any = values
    for part in location[:-1]:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.pop(location[-1], None)
    elif len(location) > 1:  # an item of a list: the whole list goes
        _remove(values, location[:-1])


def _with_absolute_paths(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    found = []
    for path in _PATHS:
        value: Any = values
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found.append((path, _absolute(value, folder)))
    return merge(values, found)


def _absolute(value: Any, folder: Path) -> Any:
    """Make file names absolute; ``module:function`` stays as it is."""
    if isinstance(value, list):
        return [_absolute(item, folder) for item in value]
    if not isinstance(value, str) or (_FUNCTION.fullmatch(value) and ".py:" not in value):
        return value
    return str(folder / Path(value).expanduser())


def _single(fault: str, hint: str = "") -> RecipeError:
    return RecipeError(fault, errors=[fault], hint=hint)
