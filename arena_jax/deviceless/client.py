"""Have plans compiled for hardware that is not here, in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from arena_jax import home
from arena_jax.deviceless.account import StageAccount
from arena_jax.deviceless.extras import versions
from arena_jax.errors import ArenaError
from arena_jax.grid import CATALOGUE, Catalogue, Plan

_MESSAGE_CHARS = 300
# Flags in the environment change what a program compiles to.
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class CompileFailed(ArenaError):
    """A compiler ended without an answer, or refused a program for another reason than memory."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program of a plan as it was compiled.

    Attributes:
        name: which stage's, and what it does.
        known: whether it was compiled before, in this call or an earlier one.
        compile_s: what compiling it took, now or then.
    """

    name: str
    fingerprint: str
    known: bool
    compile_s: float


@dataclass(kw_only=True)
class CompiledPlan:
    """A plan as XLA built it for its target.

    Attributes:
        stages: per stage, memory and collectives.
        programs: every program, in the order in which they were lowered.
    """

    plan: Plan
    stages: Sequence[StageAccount] = ()
    programs: list[Program] = field(default_factory=list)

    @property
    def memory_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return max(stage.memory_bytes for stage in self.stages)


def compile_plans(
    recipe: str,
    overrides: Sequence[str],
    plans: Sequence[Plan],
    *,
    catalogue: Catalogue = CATALOGUE,
    progress: Callable[[Plan, Program], None] = lambda plan, program: None,
) -> Iterator[CompiledPlan]:
    """Compile plans of one device type, each as soon as the one before is asked for no more.

    Args:
        recipe, overrides: what the plans are of, as on the command line.
        progress: told of every program.

    Raises:
        CompilerMissing: the compiler is not installed.
        CompileFailed: it ended without an answer.
    """
    if not plans:
        return
    platform = catalogue[plans[0].grid.allocation.device_type].platform
    found = versions(platform)
    names = {plan.grid.allocation.device_type for plan in plans}
    task = {
        "recipe": recipe,
        "overrides": list(overrides),
        "devices": {name: asdict(catalogue[name]) for name in sorted(names)},
        "versions": found | {name: os.environ.get(name, "") for name in _FLAGS},
        "folder": str(home.deviceless()),
        "plans": [(number, plan.to_json()) for number, plan in enumerate(plans)],
    }
    done = [CompiledPlan(plan=plan) for plan in plans]
    for line in _answers(task):
        current = done[line["of"]]
        if "program" in line:
            current.programs.append(Program(**line["program"]))
            progress(current.plan, current.programs[-1])
        elif "plan" in line:
            current.stages = tuple(StageAccount.from_json(stage) for stage in line["plan"])
            yield current
        else:
            raise CompileFailed(line["error"], hint=line["hint"])


def _answers(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of a worker; it ends when nobody reads on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        with path.open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "arena_jax.deviceless.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | _environment(),
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps(task))
            for line in process.stdout:
                yield json.loads(line)
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            process.stdout.close()
        if code:
            said = path.read_text(errors="replace")
            raise CompileFailed(
                f"the compiler's process ended with {code}: {_last_words(said)}",
                hint=f"the analytic estimate (without --aot) stands{_kept(said)}",
            )


def _kept(said: str) -> str:
    """Keep what a worker said, and say where."""
    path = home.deviceless() / "failed.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(said)
    except OSError:
        return ""
    return f"; all that it said is in {path}"


def _environment() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask for a TPU
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # no worker opens one
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }


def _last_words(text: str) -> str:
    """The line of a traceback or log that says most."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING: All log")]
    return lines[-1][:_MESSAGE_CHARS] if lines else "it said nothing"
