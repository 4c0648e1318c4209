"""Estimated against measured steps of GPT on the one device that is here: prepared for a GPU, five minutes at most.

    python -m benchmarks.gpu_profile [--case NAME]... [--on TYPE] [--budget SECONDS] [--limit SECONDS]

Every case is a GPT on one device. Its step is estimated from the catalogue alone, then from profiles of its
pieces, then measured in a training of a few steps. All of it goes through the command line in a fresh
``ARENA_JAX_HOME``, so that no earlier profile helps. The result names the card, its driver and the versions.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from benchmarks._report import table, write

# What one device is called: its platform, its kind, and the catalogue's name for it.
_ASK = """
import json, jax
from arena_jax.planner import allocation_of
device = jax.devices()[0]
print(json.dumps([device.platform, device.device_kind, allocation_of([device]).device_type]))
"""
_MIDDLE = ("model.num_layers=4", "model.scan_layers=true", "global_batch=8")
CASES: Mapping[str, tuple[str, ...]] = {
    "tiny": ("gpt_tiny",),
    "100m width, 4 layers": ("gpt_100m", *_MIDDLE),
    "1.3b width, 2 layers": (
        "gpt_1_3b",
        *("model.num_layers=2", "model.scan_layers=true", "precision.compute=bfloat16"),
        *("plan.num_microbatches=1", "plan.remat=off", "global_batch=4"),
    ),
}
STEPS = 12
# One program compiles and a few steps run beside what is profiled.
_TRAIN_SHARE_S = 60.0


@dataclass(frozen=True)
class Machine:
    platform: str
    kind: str
    type: str

    @property
    def environment(self) -> dict[str, str]:
        one = {"CUDA_VISIBLE_DEVICES": "0"} if self.platform in ("gpu", "cuda") else {}
        return one | {"JAX_NUM_CPU_DEVICES": "1"}


class Verbs:
    """Runs verbs of the command line with ``--json`` until the time is over."""

    def __init__(self, limit_s: float, home: str) -> None:
        self._until = time.monotonic() + limit_s
        self._environment = os.environ | {"ARENA_JAX_HOME": home}

    @property
    def left_s(self) -> float:
        return self._until - time.monotonic()

    def ask(self, *command: str, environment: Mapping[str, str] | None = None) -> Any:
        """The last line of a command's stdout, as JSON; raise ``RuntimeError`` with its stderr where it fails."""
        done = subprocess.run(
            [sys.executable, *command],
            env=self._environment | dict(environment or {}),
            capture_output=True,
            text=True,
            timeout=max(self.left_s, 1.0),
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-500:]}")
        return json.loads(done.stdout.splitlines()[-1])


def driver() -> str:
    """The card and its driver as ``nvidia-smi`` says; empty without one."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def compare(verbs: Verbs, machine: Machine, name: str, what: Sequence[str], budget_s: float) -> dict[str, Any]:
    """One case: estimated, estimated from profiles, measured."""
    recipe, *overrides = what
    overrides += ["tracking.enabled=false", "checkpoint.every=0", "eval.every=0", "cpu_devices=1"]
    on = ("--on", f"{machine.type}:1", "--json")
    cli = ("-m", "arena_jax")

    def planned() -> dict[str, Any]:
        report = verbs.ask(*cli, "plan", recipe, *overrides, *on, environment={"JAX_PLATFORMS": "cpu"})
        return next(grid for grid in report["grids"] if grid["feasible"])

    before = planned()
    budget_s = max(1.0, min(budget_s, verbs.left_s - _TRAIN_SHARE_S))
    profile = verbs.ask(
        *cli, "profile", "run", recipe, *overrides, *on, "--budget", str(budget_s), environment=machine.environment
    )
    after = planned()
    with tempfile.TemporaryDirectory() as folder:
        trained = verbs.ask(
            *(*cli, "train", recipe, *overrides, f"steps={STEPS}", f"checkpoint.dir={folder}"),
            *("--devices", "1", "--json"),
            environment=machine.environment,
        )
    return {
        "case": name,
        "estimated_s": before["step_time_s"],
        "from_profiles_s": after["step_time_s"],
        "measured_share": after["measured_share"],
        "measured_s": trained["step_time_s"],
        "pieces": len(profile["entries"]),
        "profile_device_s": profile["device_seconds"],
        "profile_wall_s": profile["wall_s"],
    }


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--on", metavar="TYPE", help="the catalogue's name of the device, where it is not found out")
    parser.add_argument("--budget", type=float, default=45.0, help="seconds of profiling a case")
    parser.add_argument("--limit", type=float, default=290.0, help="seconds in all")
    parser.add_argument("--name", help="of the result files; by default a GPU's or TPU's are kept, a CPU's are not")
    args = parser.parse_args(arguments)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        verbs = Verbs(args.limit, home)
        platform, kind, device_type = verbs.ask("-c", _ASK)
        machine = Machine(platform, kind, args.on or device_type)
        for name in args.case or CASES:
            try:
                found.append(compare(verbs, machine, name, CASES[name], args.budget))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                found.append({"case": name, "failed": str(error)[:500]})
            print(found[-1], file=sys.stderr, flush=True)
    card = driver() or f"{kind} ({platform})"
    packages = ", ".join(f"{package} {version(package)}" for package in ("jax", "jaxlib", "flax"))
    if machine.platform == "cpu" and args.name is None:
        print("\n".join(_table(found)))
        return found
    write(
        args.name or f"gpu_profile_{machine.type}",
        title=f"Estimated and measured steps on one {machine.type}",
        lines=[f"{card}; {packages}.", "", *_table(found)],
        data={"card": card, "type": machine.type, "versions": packages, "cases": found},
    )
    return found


def _table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["GPT", "measured ms", "estimated", "off %", "from profiles", "off %", "measured share %", "profiled in s"]
    rows = []
    for case in found:
        if "failed" in case:
            rows.append([case["case"], case["failed"].splitlines()[-1][:60], *[""] * 6])
            continue
        measured = case["measured_s"]
        rows.append(
            [
                case["case"],
                f"{1e3 * measured:.2f}",
                f"{1e3 * case['estimated_s']:.2f}",
                f"{100 * (case['estimated_s'] / measured - 1):+.1f}",
                f"{1e3 * case['from_profiles_s']:.2f}",
                f"{100 * (case['from_profiles_s'] / measured - 1):+.1f}",
                f"{100 * case['measured_share']:.0f}",
                f"{case['profile_wall_s']:.0f}",
            ]
        )
    return table(head, rows)


if __name__ == "__main__":
    main()
