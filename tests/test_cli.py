"""The command line: exit codes, one clear message, data on stdout, and a fast start."""

import json
import os
import pty
import re
import subprocess
import sys
from io import StringIO

import click
import pytest
from hypothesis import given
from rich.console import Console

from arena_jax.cli import app, console, main
from arena_jax.cli.accelerators import Accelerator, find_accelerators
from arena_jax.cli.health import unused_accelerator
from arena_jax.cli.progress import (
    Progress,
    _candidates,
    clock,
    meshes,
    number,
    plan_summary,
    render_candidates,
    seconds,
    size,
)
from arena_jax.errors import ArenaError, InfeasibleError
from arena_jax.recipe import find_recipes
from arena_jax.solver_setup import alpa_folder
from tests.plans import plans

HEAVY = ("jax", "jaxlib", "flax", "optax", "orbax", "mlflow", "grain", "sklearn", "scipy", "numba")


@pytest.fixture
def run(capfd):
    """``run(*args) -> (exit code, stdout, stderr)`` in this process."""

    def call(*args):
        code = main([str(arg) for arg in args])
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.mark.parametrize(
    "args", [["--help"], ["ls"], ["validate", "gpt_tiny"], ["cat", "gpt_tiny"], ["train", "--help"]]
)
def test_starts_without_heavy_imports(args):
    code = (
        "import sys; from arena_jax.cli import main; code = main(sys.argv[1:]);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("verb", app.VERBS)
def test_verb_exists_and_says_what_it_does(verb):
    command = app.group.get_command(click.Context(app.group), verb)
    assert command.help


@pytest.mark.parametrize("args", [["--help"], *([verb, "--help"] for verb in app.VERBS)])
def test_help_fits_80_columns(run, args):
    code, out, err = run(*args)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80


def test_no_arguments_shows_help_and_is_a_usage_error(run):
    code, out, err = run()
    assert (code, out) == (2, "")
    assert "Usage:" in err


def test_unknown_verb_names_the_nearest(run):
    code, out, err = run("tran", "gpt_tiny")
    assert (code, out) == (2, "")
    assert err == "error: no verb 'tran' (did you mean 'train'?)\n  hint: arena-jax --help\n"


def test_unknown_option_is_a_usage_error_also_as_json(run):
    code, out, err = run("ls", "--jso")
    assert (code, out) == (2, "")
    assert "--json" in err
    code, out, _ = run("ls", "--json", "--what")
    assert code == 2
    assert "--what" in json.loads(out.splitlines()[-1])["error"]["message"]


@pytest.fixture
def failing(monkeypatch):
    """Replaces the verb ``ls`` by one that raises what the test chose."""

    def install(error):
        @click.command()
        @console.json_option
        def command(as_json):
            raise error

        monkeypatch.setattr("arena_jax.cli.ls.command", command)

    return install


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ArenaError("it broke", hint="mend it"), 1, "it broke\n  hint: mend it"),
        (InfeasibleError("no plan fits"), 3, "no plan fits"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "/data/file"), 1, "No space left on device: /data/file"),
    ],
)
def test_errors_become_one_message_and_a_code(run, failing, error, code, message):
    failing(error)
    got, out, err = run("ls")
    assert (got, out, err.lstrip()) == (code, "", f"error: {message}\n")
    got, out, _ = run("ls", "--json")
    assert got == code
    assert json.loads(out)["error"]["message"] == message.split("\n")[0]


def test_a_bug_keeps_its_traceback(run, failing):
    failing(RuntimeError("index off by one"))
    code, out, err = run("ls", "--json")
    assert code == 1
    assert "Traceback" in err
    assert json.loads(out) == {"error": {"type": "RuntimeError", "message": "index off by one"}}


def test_closed_pipe_is_silent():
    command = f"{sys.executable} -m arena_jax --help | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


def test_ls_lists_what_is_on_disk(run):
    code, out, _ = run("ls", "--json")
    recipes = json.loads(out)["recipes"]
    assert code == 0
    assert [recipe["name"] for recipe in recipes] == [info.name for info in find_recipes()]
    assert all(os.path.isfile(recipe["path"]) and recipe["summary"] for recipe in recipes)
    code, out, _ = run("ls")
    assert [line.split()[0] for line in out.splitlines()] == [recipe["name"] for recipe in recipes]


def test_cat_prints_the_file_and_resolved_the_whole(run):
    code, out, _ = run("cat", "gpt_tiny")
    path = next(info.path for info in find_recipes() if info.name == "gpt_tiny")
    assert (code, out) == (0, path.read_text())
    code, out, _ = run("cat", "gpt_tiny", "--resolved", "steps=70")
    assert code == 0
    assert re.search(r"^steps: 70$", out, re.MULTILINE)
    assert "checkpoint:" in out


def test_cp_never_overwrites_silently(run, tmp_path):
    target = tmp_path / "mine.yaml"
    assert run("cp", "gpt_tiny", target)[0] == 0
    original = target.read_text()
    target.write_text("edited")
    code, out, err = run("cp", "gpt_tiny", target)
    assert (code, out) == (2, "")
    assert "exists" in err
    assert "--force" in err
    assert target.read_text() == "edited"
    assert run("cp", "gpt_tiny", target, "--force")[0] == 0
    assert target.read_text() == original
    assert run("cp", "gpt_tiny", tmp_path)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt_tiny.yaml", "mine.yaml"]
    assert run("validate", target)[0] == 0


def test_cp_into_a_missing_folder(run, tmp_path):
    code, _, err = run("cp", "gpt_tiny", tmp_path / "no" / "mine.yaml")
    assert code == 2
    assert "no folder" in err


def test_validate_names_every_fault(run):
    code, out, err = run("validate", "gpt_tiny", "step=5", "global_batch=many", "--json")
    answer = json.loads(out.splitlines()[-1])
    assert (code, answer["valid"]) == (2, False)
    assert len(answer["errors"]) == 2
    assert any("'steps'" in line for line in answer["errors"])
    assert any("global_batch" in line for line in answer["errors"])
    assert len([line for line in err.splitlines() if line.startswith("error:")]) == 2


def test_validate_unknown_recipe_names_the_nearest(run):
    code, out, err = run("validate", "gpt_tny", "--json")
    assert code == 2
    assert "gpt_tiny" in json.loads(out)["errors"][0]
    assert "gpt_tiny" in err


def test_validate_valid(run):
    assert run("validate", "gpt_tiny", "--json")[:2] == (0, '{"valid": true, "errors": []}\n')


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_and_its_answers(run, shell):
    code, out, _ = run("completion", shell)
    assert code == 0
    assert "_ARENA_JAX_COMPLETE" in out
    environment = {**os.environ, "_ARENA_JAX_COMPLETE": "bash_complete"}
    environment |= {"COMP_WORDS": "arena-jax validate gpt_ti", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", "from arena_jax.cli import main; main([])"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split(",")[-1].strip() == "gpt_tiny"


def test_doctor_reports_engines_devices_and_caches(run):
    code, out, _ = run("doctor", "--json")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    assert code == 0
    assert checks["jax"]["status"] == checks["engine highs"]["status"] == "ok"
    assert checks["devices"]["detail"].startswith("8 x cpu")
    assert {"engine alpa", "compiler cuda", "compiler tpu", "caches", "cache compile"} <= set(checks)
    missing = [check for check in checks.values() if check["status"] in ("note", "broken")]
    assert all(check["hint"] for check in missing)
    assert checks["engine alpa"]["status"] == ("ok" if alpa_folder() else "note")


def test_accelerators_are_found_by_their_device_files(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_accelerators(tmp_path) == ()
    (tmp_path / "dev/vfio").mkdir(parents=True)
    (tmp_path / "dev/vfio/0").touch()
    assert find_accelerators(tmp_path) == ()
    device = tmp_path / "sys/bus/pci/devices/0000:00:04.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x1ae0\n")
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev" / name).touch()
    assert find_accelerators(tmp_path) == (
        Accelerator(description="2 x NVIDIA GPU", extra="cuda12"),
        Accelerator(description="1 x TPU", extra="tpu"),
    )


def test_an_unused_accelerator_is_a_warning_with_the_remedy(monkeypatch):
    found = (Accelerator(description="8 x NVIDIA H100", extra="cuda12"),)
    assert unused_accelerator({"gpu"}, found) is None
    assert unused_accelerator({"cpu"}, ()) is None
    monkeypatch.delenv("JAX_PLATFORMS")
    warning = unused_accelerator({"cpu"}, found)
    assert "jax runs on CPU" in warning.detail
    assert "install -U 'jax[cuda12]==" in warning.hint
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "JAX_PLATFORMS" in unused_accelerator({"cpu"}, found).hint


def test_track_sync_without_a_log(run, tmp_path):
    code, out, err = run("track", "sync", tmp_path, "--json")
    assert code == 1
    assert "no event log" in err
    assert "no event log" in json.loads(out)["error"]["message"]


def screen(args, **environment):
    """What ``arena-jax args`` writes to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", **environment}
    with subprocess.Popen([sys.executable, "-m", "arena_jax", *args], stdout=follower, stderr=follower, env=env):
        os.close(follower)
        text = b""
        try:
            while data := os.read(leader, 4096):
                text += data
        except OSError:  # Linux says so when the other end is gone
            pass
    os.close(leader)
    return text.decode()


def test_colour_on_a_terminal_and_none_under_no_color(tmp_path):
    args = ["track", "sync", str(tmp_path)]
    assert "\x1b[" in screen(args)
    plain = screen(args, NO_COLOR="1")
    assert "\x1b" not in plain
    assert plain.startswith("error: no event log")


ROWS = [
    {"grid": "cpu:8/s1", "dp_tp": [[8, 1]], "num_microbatches": 4, "step_time_s": 0.2, "memory_bytes": 3e8,
     "feasible": True, "reason": "", "chosen": False},
    {"grid": "cpu:8/s2", "dp_tp": [[4, 1], [2, 2]], "num_microbatches": 4, "step_time_s": 0.1, "memory_bytes": 1e8,
     "feasible": True, "reason": "", "chosen": True, "objectives": {"highs": 0.09, "alpa": 0.09}},
    {"grid": "cpu:8/s8", "dp_tp": None, "num_microbatches": None, "step_time_s": None, "memory_bytes": None,
     "feasible": False, "reason": "8 stages need 8 layers and the model has only 6 of them, which is fewer"},
]  # fmt: skip


def test_candidate_table_is_sorted_marked_and_whole_in_a_file(tmp_path):
    path = tmp_path / "table"
    with open(path, "w") as file:
        render_candidates(ROWS, file=file)
    lines = path.read_text().splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["*", "cpu:8/s1", "cpu:8/s8"]
    assert "4x1 2x2" in lines[1]
    assert lines[1].endswith("chosen; highs 90 ms, alpa 90 ms")
    assert lines[3].endswith(ROWS[2]["reason"])
    assert all(line == line.rstrip() for line in lines)


def test_candidate_table_fits_a_terminal(tmp_path):
    console = Console(file=StringIO(), force_terminal=True, width=80)
    for renderable in _candidates(ROWS, console):
        console.print(renderable)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in console.file.getvalue().splitlines()]
    assert [line.split()[0] for line in lines[1:]] == ["*", "cpu:8/s1", "cpu:8/s8"]
    assert "8 stages need 8" in lines[3]
    assert max(map(len, lines)) <= 80


@given(plans())
def test_a_plan_in_short(plan):
    head, *stages = plan_summary(plan)
    assert head.startswith(f"plan {plan.plan_id} on {plan.grid}, ")
    for line, stage in zip(stages, plan.stages, strict=True):
        assert f"dp x tp {stage.dp}x{stage.tp}  zero {stage.zero}  remat {'on' if stage.remat else 'off'}" in line


def test_long_candidate_tables_are_cut_and_say_so(tmp_path):
    path = tmp_path / "table"
    with open(path, "w") as file:
        render_candidates(ROWS * 10, file=file)
    assert path.read_text().splitlines()[-1] == "... and 14 more"


def test_plain_progress_is_rate_limited_and_ends_with_the_last_step(tmp_path):
    path = tmp_path / "log"
    with open(path, "w") as file, Progress(1000, name="gpt_tiny", file=file) as progress:
        progress.on_event({"kind": "candidates", "rows": ROWS})
        progress.on_event({"kind": "plan", "plan_id": "ab", "grid": "cpu:8/s2", "estimated_step_time_s": 0.1})
        for step in range(1, 301):
            progress.on_event(
                {"kind": "step", "step": step, "loss": 2.5, "step_time_s": 0.1, "rate": 19048.0, "rate_unit": "tokens"}
            )
        progress.on_event({"kind": "eval", "step": 300, "metrics": {"loss": 2.4}})
        progress.on_event({"kind": "warning", "message": "tracking failed"})
        progress.on_event({"kind": "unheard_of"})
    text = path.read_text()
    steps = [line for line in text.splitlines() if line.startswith("step")]
    assert len(steps) < 10
    assert steps[-1].startswith("step  300/1000  loss 2.5  100 ms/step  19,048 tokens/s  eta")
    assert "eval at step 300: loss 2.4" in text
    assert "warning: tracking failed" in text
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "\x1b" not in text


def test_numbers_for_people():
    assert [number(v) for v in (2.34567891, 1e-7, "nan", 12345678.0)] == ["2.3457", "1e-07", "nan", "1.2346e+07"]
    assert [seconds(v) for v in (2e-6, 0.0512, 3.25, 4000)] == ["2 us", "51.2 ms", "3.25 s", "4,000 s"]
    assert [clock(v) for v in (5, 65, 3723)] == ["0:05", "1:05", "1:02:03"]
    assert [size(v) for v in (2**20, 3 * 2**30, 2**41)] == ["1 MiB", "3 GiB", "2 TiB"]
    assert meshes([[2, 1], [2, 1], [1, 2]]) == "2x1 *2 1x2"
