"""Recipes: what is bundled, the text, overrides, and every fault at once."""

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arena_jax.errors import RecipeError
from arena_jax.recipe import find_recipes, load_recipe, recipe_from_mapping
from arena_jax.recipe.text import dump_yaml, merge, parse_override, parse_yaml

TRANSFORMERS = ("760m", "1_3b", "2_6b", "6_7b", "15b")
PROMISED = {
    *("gpt_tiny", "bert_tiny", "moe_tiny", "wide_resnet_tiny", "gpt_100m"),
    *(f"{family}_{size}" for family in ("gpt", "bert") for size in TRANSFORMERS),
    *(f"moe_{size}" for size in ("690m", "1_3b", "2_4b", "10b", "27b")),
    *(f"wide_resnet_{size}" for size in ("500m", "1b", "2b", "4b", "6_8b")),
}


def faults_of(name: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_recipe(name, overrides)
    assert all(fault in str(caught.value) for fault in caught.value.errors)
    return list(caught.value.errors)


def test_the_promised_recipes_exist_each_with_a_summary() -> None:
    found = find_recipes()
    assert {info.name for info in found} == PROMISED
    assert all(20 < len(info.summary) < 120 for info in found)
    assert all(info.path.is_file() for info in found)


@pytest.mark.parametrize("name", sorted(PROMISED))
def test_a_bundled_recipe_survives_its_own_text(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    again = recipe_from_mapping(parse_yaml(recipe.to_yaml(), "a test"))
    assert again.resolved() == recipe.resolved()


@pytest.mark.parametrize("name", sorted(PROMISED - {"gpt_100m"} - {n for n in PROMISED if n.endswith("_tiny")}))
def test_paper_size_recipes_pin_what_the_artifact_ran(name: str) -> None:
    recipe = load_recipe(name)
    plan = recipe.plan
    assert (plan.num_microbatches, plan.remat, plan.zero) == (16, "on", 0)
    family = name.rpartition("_")[0].removesuffix("_1").removesuffix("_2").removesuffix("_6")
    wanted = {"bert": "adamw", "gpt": "adamw", "moe": "adafactor", "wide_resnet": "sgd"}[family]
    assert recipe.optimizer.name == wanted
    assert recipe.precision.compute == ("float32" if family == "wide_resnet" else "float16")
    assert (recipe.optimizer.options.get("nesterov") is True) == (family == "wide_resnet")


def test_listing_and_loading_import_neither_jax_nor_numpy() -> None:
    code = (
        "import sys; from arena_jax.recipe import find_recipes, load_recipe; find_recipes(); "
        "load_recipe('bert_tiny').to_yaml(); "
        "print([m for m in ('jax', 'flax', 'optax', 'mlflow', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_numbers_and_words_mean_what_they_look_like() -> None:
    text = "{a: 1e-4, b: off, c: 1:30, d: 010, e: 1_000, f: yes, g: true, h: .5, i: null, j: -inf, k: 5: cpu}"
    text = text.replace("k: 5: cpu", 'k: "5: cpu:2"')
    assert parse_yaml(text, "a test") == {
        "a": 1e-4,
        "b": "off",
        "c": "1:30",
        "d": 10,
        "e": 1000,
        "f": "yes",
        "g": True,
        "h": 0.5,
        "i": None,
        "j": -math.inf,
        "k": "5: cpu:2",
    }


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
)
KEYS = st.lists(st.text("abcdef_", min_size=1, max_size=6), min_size=1, max_size=4)


@given(value=st.dictionaries(st.text("abc", min_size=1), VALUES))
def test_what_is_dumped_loads_back_equal(value: dict[str, Any]) -> None:
    assert parse_yaml(dump_yaml(value), "a test") == value


@given(key=KEYS, value=st.integers() | st.floats(allow_nan=False) | st.booleans())
def test_an_override_keeps_its_type(key: list[str], value: Any) -> None:
    for text in (repr(value).lower(), f" {repr(value).lower()}"):
        path, parsed = parse_override(f"{'.'.join(key)}={text}")
        assert path == tuple(key)
        assert parsed == value
        assert type(parsed) is type(value)


@given(key=KEYS, value=SCALARS, values=st.dictionaries(st.text("abcdef", min_size=1), VALUES))
def test_merging_sets_one_value_and_touches_nothing_else(key: list[str], value: Any, values: dict[str, Any]) -> None:
    before = dump_yaml(values)
    try:
        merged = merge(values, [(tuple(key), value)])
    except RecipeError as error:
        assert "not a section" in str(error)  # noqa: PT017
        merged = None
    assert dump_yaml(values) == before
    if merged is None:
        return
    inner: Any = merged
    for part in key:
        inner = inner[part]
    assert inner == value
    assert {k: v for k, v in merged.items() if k != key[0]} == {k: v for k, v in values.items() if k != key[0]}


@given(st.text(max_size=40))
def test_any_override_parses_or_is_a_recipe_error(text: str) -> None:
    try:
        path, _ = parse_override(text)
    except RecipeError:
        return
    assert path
    assert all(path)


def test_overrides_win_and_are_typed() -> None:
    recipe = load_recipe(
        "gpt_tiny",
        [
            "optimizer.learning_rate=1e-4",
            "model.hidden=192",
            "plan.remat=off",
            "plan.dp=[4, 2]",
            "tracking.enabled=false",
        ],
    )
    assert recipe.optimizer.learning_rate == 1e-4
    assert recipe.model.config["hidden"] == 192
    assert recipe.plan.remat == "off"
    assert recipe.plan.dp == [4, 2]
    assert recipe.tracking.enabled is False
    assert load_recipe("gpt_tiny", ['hook.script=["5: cpu:4/s2", "15: cpu:2"]']).hook.script == [
        "5: cpu:4/s2",
        "15: cpu:2",
    ]


def test_every_fault_at_once_with_the_nearest_key() -> None:
    faults = faults_of(
        "gpt_tiny",
        "seed",
        "modl.hidden=3",
        "model.hiden=4",
        "model.num_layers=x",
        "steps=1.5",
        "plan.zero=7",
        "data.kind=stdlb",
        "optimizer.options.b3=1",
        "global_batch=50",
        "plan.num_microbatches=4",
    )
    expected = [
        r"override 'seed' is not key=value",
        r"modl: unknown key \(did you mean 'model'\?\)",
        r"model.hiden: unknown key \(did you mean 'hidden'\?\)",
        r"model.num_layers: should be a valid integer, got 'x'",
        r"steps: should be a valid integer, got 1.5",
        r"plan.zero: must be 'search', 0, 1, 2 or 3, got 7",
        r"data.kind: must be .* got 'stdlb' \(did you mean 'stdlib'\?\)",
        r"optimizer.options.b3: adamw has no such option \(did you mean 'b\d'\?\)",
        r"global_batch: 50 does not split into 4 microbatches; global_batch=48 or plan.num_microbatches=5 would",
    ]
    assert len(faults) == len(expected)
    assert all(any(re.fullmatch(pattern, fault) for fault in faults) for pattern in expected), faults


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["model.num_heads=7"], "model: hidden 96 does not divide into 7 heads"),
        (["hiden=3"], "hiden: unknown key (did you mean 'model.hidden'?)"),
        (["tp=2"], "tp: unknown key (did you mean 'plan.tp'?)"),
        (["plan.hidden=3"], "plan.hidden: unknown key (did you mean 'model.hidden'?)"),
        (["model.dp=3"], "model.dp: unknown key (did you mean 'plan.dp'?)"),
        (["model.name=gtp"], "model.name: no model is called 'gtp' (did you mean 'gpt'?)"),
        (["model.vocabulary=100"], "model.vocabulary: 100 is too small for bytes; 256 would do"),
        (["data.objective=masked"], "model.vocabulary: 256 is too small for mask token 256; 257 would do"),
        (["model.dropout=true"], "model.dropout: should be a valid number, got True"),
        (["data.sequence_length=65"], "data.sequence_length: 65 is longer than model.sequence_length=64"),
        (["data.kind=text"], "data.files: needed for data.kind=text"),
        (["data.validation_fraction=0"], "data.validation_fraction: 0, but eval.every asks for validation"),
        (["plan.dp=5"], "global_batch: 48 does not divide over plan.dp=5; 50 would"),
        (["plan.grid=gpu9:4"], "plan.grid: "),
        (["plan.grid=a100:4/s8"], "plan.grid: "),
        (["plan.grid=cpu:4/s2", "plan.stages=3"], "plan.stages: 3, but plan.grid=cpu:4/s2 has 2"),
        (["plan.grid=cpu:8/s1", "plan.dp=2", "plan.tp=2"], "plan.dp: dp 2 x tp 2 is not the 8 devices of cpu:8/s1"),
        (["plan.stages=3", "plan.dp=[1, 2]"], "plan.dp: 2 sizes for 3 stages"),
        (
            ["optimizer.warmup_steps=300", "optimizer.decay_steps=200"],
            "optimizer.warmup_steps: 300 leaves nothing to decay before step 200",
        ),
        (["hook.script=[5 cpu]"], "hook.script: '5 cpu' is not \"STEP: GRID\""),
        (["steps=0"], "steps: should be greater than 0, got 0"),
        (["steps=null"], "steps: missing"),
        (["steps.x=2"], "steps.x: steps is the value 300, not a section"),
        (["plan=3"], "plan: should be a valid dictionary"),
        (["precision.compute=fp16"], "precision.compute: must be"),
        (["model.file=x.py"], "model: name a bundled model (model.name) or a file of your own"),
    ],
)
def test_one_clear_fault(overrides: list[str], fault: str) -> None:
    faults = faults_of("gpt_tiny", *overrides)
    assert any(found.startswith(fault) for found in faults), faults


def test_unknown_names_and_files_are_refused(tmp_path: Path) -> None:
    assert "did you mean 'gpt_tiny'?" in faults_of("gpt_tny")[0]
    assert "no recipe file" in faults_of("./absent.yaml")[0]
    (tmp_path / "list.yaml").write_text("[1, 2]")
    assert "no recipe" in faults_of(str(tmp_path / "list.yaml"))[0]
    (tmp_path / "torn.yaml").write_text("steps: 3\nmodel: {name: gpt")
    assert (
        "line 2" in faults_of(str(tmp_path / "torn.yaml"))[0] or "line 3" in faults_of(str(tmp_path / "torn.yaml"))[0]
    )
    (tmp_path / "twice.yaml").write_text("steps: 3\nsteps: 4")
    assert "'steps' stands twice" in faults_of(str(tmp_path / "twice.yaml"))[0]
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in faults_of(str(tmp_path / "binary.yaml"))[0]


MODEL = """
from dataclasses import dataclass
import arena_jax.no_such_module  # a recipe is checked without importing the file


@dataclass(frozen=True)
class Config:
    width: int
    sizes: tuple[int, ...] = (1, 2)
    vocabulary: int = 256
    sequence_length: int = 16
"""


def test_a_model_file_of_ones_own_is_checked_unimported_and_found_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    path = tmp_path / "mine.yaml"
    path.write_text("model: {file: ./mine.py, width: 3, sizes: [4, 5]}\nglobal_batch: 8\nsteps: 2\n")
    recipe = load_recipe(str(path))
    assert recipe.model_file == tmp_path / "mine.py"
    assert recipe.resolved()["model"]["sizes"] == [4, 5]
    assert faults_of(str(path), "model.sizes=[a]", "model.widht=2") == [
        "model.sizes.0: should be a valid integer, got 'a'",
        "model.widht: unknown key (did you mean 'width'?)",
    ]
    path.write_text("model: {file: ./mine.py}\nglobal_batch: 8\nsteps: 2\n")
    assert faults_of(str(path)) == ["model.width: missing"]
    (tmp_path / "mine.py").unlink()
    path.write_text("model: {file: ./gone.py}\nglobal_batch: 8\nsteps: 2\n")
    assert "cannot read the model file" in faults_of(str(path))[0]


def test_a_function_is_a_recipe_too() -> None:
    recipe = load_recipe("my_module:make", ["steps=7", "plan.grid=cpu:4"])
    assert (recipe.name, recipe.function, recipe.steps) == ("make", "my_module:make", 7)
    assert load_recipe("jobs/mine.py:make").function == str(Path.cwd() / "jobs/mine.py:make")


def test_file_names_are_relative_to_the_recipe_but_overrides_to_the_folder_at_hand(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {name: gpt}\nglobal_batch: 8\nsteps: 2\ndata: {kind: text, files: ['texts/*.txt']}\n")
    assert load_recipe(str(path)).data.files == [str(tmp_path / "texts/*.txt")]
    assert load_recipe(str(path), ["data.files=[here.txt]"]).data.files == [str(Path.cwd() / "here.txt")]


@pytest.mark.parametrize("key", ["hidden", "num_layers", "num_heads", "sequence_length", "feed_forward"])
def test_sizes_of_zero_are_named(key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("gpt_tiny", [f"model.{key}=0"])
    assert caught.value.errors == (f"model.{key}: 0, and 1 is the least",)
