"""The cluster service on one machine: six trainings of four families on two virtual device types.

    python -m benchmarks.service_demo [--write]          # what `make demo` runs

Every family runs one step on every number of devices first, so that plans and compiled programs are there for
both policies. Then the jobs arrive under the policy ``arena``, and at the same times under rigid first come, first
served, where each gets what its user asked for. Steps are paced to the types' nominal speeds; starting takes what
it takes here. The second run changes nothing, so its losses are those of undisturbed runs.
The last line is one JSON object.
"""

import argparse
import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster, JobSpec, ProfileSet, RestartCosts, Scenario, TableProfile, simulate, summary
from arena_jax.scheduler.costs import CAUSES
from arena_jax.service.estimates import index_from_json
from arena_jax.service.protocol import call
from arena_jax.service.store import Store
from benchmarks._report import table, write

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = """
[types.quick]
threads = 1
peak_flops = 2e8
memory_bandwidth = 2e8
devices_per_node = 4

[types.slow]
threads = 1
peak_flops = 1e8
memory_bandwidth = 1e8
devices_per_node = 4

[[nodes]]
type = "quick"
devices = 4

[[nodes]]
type = "slow"
devices = 4
"""
_COMMON = ("global_batch=16", "eval.every=0", "checkpoint.every=20", "tracking.enabled=false", "plan.stages=1")
_LANGUAGE = ("model.num_layers=2", "model.hidden=48", "model.num_heads=4", *_COMMON)
OVERRIDES = {
    "gpt_tiny": _LANGUAGE,
    "bert_tiny": _LANGUAGE,
    "moe_tiny": (*_LANGUAGE, "model.feed_forward=96", "model.num_experts=4"),
    # Its float32 losses part early at the recipe's rate: in constant pixels batch normalisation divides noise by noise.
    "wide_resnet_tiny": ("model.blocks=[1, 1, 1]", "model.width_factor=1", "optimizer.learning_rate=0.003", *_COMMON),
}
# Recipe, steps, seconds of its arrival, and what its user asked for: everybody wants the fast type. In the simulator
# jobs grow, shrink and move to the other type here whatever changes cost, from 7 to 24 s.
JOBS = (
    ("gpt_tiny", 20, 0.0, "quick:2"),
    ("bert_tiny", 60, 20.0, "quick:2"),
    ("moe_tiny", 15, 25.0, "quick:4"),
    ("wide_resnet_tiny", 55, 30.0, "quick:2"),
    ("gpt_tiny", 15, 50.0, "quick:2"),
    ("bert_tiny", 20, 60.0, "quick:4"),
)
# Programs are the same on both types, which differ in their pace.
REHEARSED = (("quick", 4), ("slow", 2), ("slow", 1))
# What changes are thought to cost before any was measured.
RESTART_S, RESIZE_S = 12.0, 3.0
MOST_DEVICES = 4
KINDS = ("start", "resume", "grow", "shrink", "move", "migrate", "pause", "finish", "fail")
ENDED = ("finished", "failed", "cancelled")
# Relative difference of final losses; float32 sums in another order, and BatchNorm amplifies it.
TOLERANCE = 0.05


class Served:
    """A service in a process of its own, and what the demo says to it."""

    def __init__(self, state: Path, cluster: Path, policy: str, *more: str) -> None:
        self.state = state
        self._log = open(f"{state}.log", "ab")  # noqa: SIM115  # closed in close()
        command = [sys.executable, "-m", "arena_jax", "serve", "--cluster", str(cluster), "--state", str(state)]
        command += [
            "--policy",
            policy,
            "--port",
            "0",
            "--restart-s",
            str(RESTART_S),
            "--resize-s",
            str(RESIZE_S),
            *more,
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log, env=environment)
        until = time.monotonic() + 120
        while not (state / "service.json").exists():
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the service did not start; see {state}.log")
            time.sleep(0.1)

    def ask(self, **request: Any) -> dict[str, Any]:
        return call(self.state, request, timeout_s=60)

    def submit(
        self, recipe: str, steps: int, *overrides: str, on: str = "", least: int = 1, most: int = MOST_DEVICES
    ) -> str:
        """Give it a training of a family; ``overrides`` come after the family's own. Returns the job's id."""
        from arena_jax.recipe import load_recipe
        from arena_jax.service.job import Submission

        loaded = load_recipe(recipe, [*OVERRIDES[recipe], *overrides, f"steps={steps}"])
        spec = Submission(
            kind="recipe", name=recipe, recipe=loaded.to_yaml(), steps=steps, on=on, min_devices=least, max_devices=most
        )
        return str(self.ask(do="submit", job=spec.to_json())["job"]["id"])

    def jobs(self) -> list[dict[str, Any]]:
        return self.ask(do="status", ended=100)["jobs"]

    def wait(self) -> None:
        """Until all jobs have ended."""
        while any(job["state"] not in ENDED for job in self.jobs()):
            time.sleep(0.5)

    def close(self) -> None:
        for job in self.jobs():
            if job["state"] not in ENDED:
                self.ask(do="cancel", job=job["id"])
        self.wait()
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


def rehearse(state: Path, cluster: Path) -> None:
    """Run one step of every family on every number of devices, under a service of its own.

    Plans and compiled programs are then in the caches, as where such jobs have run before; else whichever policy plays
    first would compile for the other.
    """
    served = Served(state, cluster, "fcfs")
    for recipe in OVERRIDES:
        for kind, num_devices in REHEARSED:
            served.submit(recipe, 1, on=f"{kind}:{num_devices}")
    served.wait()
    bad = [job for job in served.jobs() if job["state"] != "finished"]
    served.close()
    if bad:
        raise SystemExit(f"{bad[0]['id']}: {bad[0]['reason']}")


def plan_ahead(served: Served, nodes: Sequence[str], submit: Callable[[], Sequence[str]]) -> None:
    """Have the service know the plans of jobs, with all nodes drained, so that arrival times mean something.

    Args:
        submit: submits the jobs and returns their ids; they are not run.
    """
    for node in nodes:
        served.ask(do="drain", node=node)
    ids = submit()
    while any(job["state"] == "planning" for job in served.jobs()):
        time.sleep(0.5)
    for name in ids:
        served.ask(do="cancel", job=name)
    for node in nodes:
        served.ask(do="undrain", node=node)
    for job in served.jobs():
        if job["state"] == "failed":
            raise SystemExit(f"{job['id']}: {job['reason']}")


def play(state: Path, cluster: Path, policy: str) -> dict[str, Any]:
    """Submit the jobs as they arrive, wait for their end, and return what happened."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    served = Served(state, cluster, policy)
    began, began_at = time.monotonic(), time.time()
    print(f"{policy}: page {served.ask(do='status')['page']}", file=sys.stderr, flush=True)
    ids = []
    for recipe, steps, arrival_s, on in JOBS:
        time.sleep(max(0.0, began + arrival_s - time.monotonic()))
        ids.append(served.submit(recipe, steps, on=on))
    while True:
        jobs = [job for job in served.jobs() if job["id"] in ids]
        line = ", ".join(f"{job['id']} {job['allocation'] or job['state']} {job['step']}" for job in jobs)
        print(f"{policy} {time.monotonic() - began:4.0f} s: {line}", file=sys.stderr, flush=True)
        if all(job["state"] in ENDED for job in jobs):
            break
        time.sleep(2)
    wall_s = time.monotonic() - began
    served.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    store = Store(state / "state.sqlite")
    events = [event for event in store.events(last=100_000) if event["job"] in ids and event["kind"] in KINDS]
    page = _page(store, state, cluster, policy)
    for event in events:  # so that a run that is broken off has told what it can
        what = f"{event.get('from') or ''} -> {event.get('to') or ''} {event.get('how', '')}"
        print(f"{policy} {event['time'] - began_at:5.1f} s {event['job']} {event['kind']} {what}", file=sys.stderr)
    return {
        "policy": policy,
        "jobs": jobs,
        "events": [
            {
                "time": round(event["time"] - began_at, 2),
                "job": event["job"],
                "kind": event["kind"],
                "from": event.get("from"),
                "to": event.get("to"),
                "how": event.get("how", ""),
            }
            for event in events
        ],
        "arrivals_s": [job["submitted_at"] - began_at for job in jobs],
        "jct_s": [job["finished_at"] - job["submitted_at"] for job in jobs],
        "costs_s": {cause: values for cause in CAUSES if (values := store.charges(cause, 1000))},
        "load": cpu_s / wall_s / len(os.sched_getaffinity(0)),
        "wall_s": wall_s,
        "page": page,
    }


def went_on(events: Sequence[Mapping[str, Any]], cluster: Cluster) -> dict[str, int]:
    """How often a job went on with more devices, with fewer, on another type; at once or after it had waited."""
    found = {"more devices": 0, "fewer devices": 0, "another type": 0}
    for event in events:
        if event["from"] and event["to"]:
            before, after = (Allocation.parse(event[key], cluster.catalogue) for key in ("from", "to"))
            found["more devices"] += after.num_devices > before.num_devices
            found["fewer devices"] += after.num_devices < before.num_devices
            found["another type"] += after.device_type != before.device_type
    return found


def told_on(counts: Mapping[str, int]) -> str:
    """What :func:`went_on` found, as a sentence."""
    return "Jobs went on, at once or after waiting: " + ", ".join(f"{n} on {what}" for what, n in counts.items()) + "."


def _page(store: Store, state: Path, cluster: Path, policy: str) -> str:
    from arena_jax.cli.serve import nominal_label
    from arena_jax.service.page import render
    from arena_jax.service.service import Options

    made = Cluster.load(cluster)
    return render(store, Options(state=state, cluster=made, policy=policy, label=nominal_label(made)))


def predict(played: Mapping[str, Any], state: Path, cluster: Path, costs: RestartCosts) -> float:
    """Mean completion time that the simulator gives for the same jobs under the same policy."""
    store = Store(state / "state.sqlite")
    keys = {job.id: job.plan_key for job in store.jobs()}
    specs, profiles = [], {}
    for row, arrival_s, (_, steps, _, on) in zip(played["jobs"], played["arrivals_s"], JOBS, strict=True):
        key = keys[row["id"]]
        index = index_from_json(store.index(key) or {})
        profiles[key, None] = TableProfile({a: step.step_time_s for a, step in index.items()})
        asked = Allocation.parse(on, None)
        specs.append(
            JobSpec(
                id=row["id"], arrival_s=max(0.0, arrival_s), num_steps=steps, model=key, max_devices=MOST_DEVICES,
                device_type=asked.device_type, num_devices=asked.num_devices,
            )
        )  # fmt: skip
    scenario = Scenario(jobs=tuple(specs), cluster=Cluster.load(cluster), profiles=ProfileSet(profiles), costs=costs)
    return float(summary(simulate(scenario, played["policy"]))["mean_jct_s"])


def known_before() -> RestartCosts:
    """The costs that the service begins with."""
    return RestartCosts(**{**dict.fromkeys(CAUSES, RESTART_S), "grow": RESIZE_S, "shrink": RESIZE_S})


def measured(played: Mapping[str, Any]) -> RestartCosts:
    """The mean costs of the run itself, where it has had a cause."""
    costs = {cause: sum(values) / len(values) for cause, values in played["costs_s"].items()}
    return RestartCosts(**{**{cause: getattr(known_before(), cause) for cause in CAUSES}, **costs})


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the results under benchmarks/results")
    parser.add_argument("--pages", type=Path, help="folder to keep both pages in")
    options = parser.parse_args(argv)
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="arena-jax-demo-"))
    cluster = folder / "cluster.toml"
    cluster.write_text(CLUSTER)
    print(
        "virtual CPU devices, paced to nominal speeds; planning and compiling the four families first", file=sys.stderr
    )
    rehearse(folder / "rehearsal", cluster)
    served = Served(folder / "arena", cluster, "arena")
    try:
        plan_ahead(served, ("quick/0", "slow/0"), lambda: [served.submit(recipe, 1) for recipe in OVERRIDES])
    finally:
        served.close()
    planned_s = time.monotonic() - began
    (folder / "fcfs").mkdir(mode=0o700)
    with (
        sqlite3.connect(folder / "arena/state.sqlite") as kept,
        sqlite3.connect(folder / "fcfs/state.sqlite") as copy,
    ):
        kept.backup(copy)
    runs = {policy: play(folder / policy, cluster, policy) for policy in ("arena", "fcfs")}
    ours, theirs = runs["arena"], runs["fcfs"]
    means = {name: sum(run["jct_s"]) / len(run["jct_s"]) for name, run in runs.items()}
    predictions = {
        name: {
            "before": predict(run, folder / name, cluster, known_before()),
            "with measured costs": predict(run, folder / name, cluster, measured(run)),
        }
        for name, run in runs.items()
    }
    losses = [
        (a["id"], a["loss"], b["loss"], abs(a["loss"] - b["loss"]) / abs(b["loss"]))
        for a, b in zip(ours["jobs"], theirs["jobs"], strict=True)
    ]
    for name, run in runs.items():
        page = run.pop("page")
        if options.pages is not None:
            options.pages.mkdir(parents=True, exist_ok=True)
            (options.pages / f"{name}.html").write_text(page)
    counts = {kind: sum(event["kind"] == kind for event in ours["events"]) for kind in KINDS}
    changed = went_on(ours["events"], Cluster.load(cluster))
    lines = _lines(runs, means, predictions, losses, counts, changed)
    data = {
        "jobs": ours["jobs"],
        "events": ours["events"],
        "went_on": changed,
        "mean_jct_s": {"arena": means["arena"], "fcfs": means["fcfs"]},
        "ratio": means["arena"] / means["fcfs"],
        "predicted_mean_jct_s": predictions,
        "final_losses": [list(row) for row in losses],
        "costs_s": {name: run["costs_s"] for name, run in runs.items()},
        "load": {name: run["load"] for name, run in runs.items()},
        "planned_s": planned_s,
        "wall_s": time.monotonic() - began,
        "fcfs": {"jobs": theirs["jobs"], "events": theirs["events"]},
        "speeds": "nominal",
    }
    lines.append(f"\nPlanned and compiled in {planned_s:.0f} s; the whole took {data['wall_s']:.0f} s.")
    if options.write:
        write("service_demo", title="Six jobs on two virtual device types, nominal speeds", lines=lines, data=data)
    else:
        print("\n".join(lines))
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(data))


def _lines(
    runs: Mapping[str, Any],
    means: Mapping[str, float],
    predictions: Mapping[str, Mapping[str, float]],
    losses: Sequence[tuple[str, float, float, float]],
    counts: Mapping[str, int],
    changed: Mapping[str, int],
) -> list[str]:
    head = ("policy", "mean JCT s", "predicted before", "with measured costs", "last end s", "load of the cores")
    rows = []
    for name, run in runs.items():
        said = predictions[name]
        rows.append(
            (
                name,
                f"{means[name]:.1f}",
                *(f"{value:.1f} ({value / means[name] - 1:+.0%})" for value in said.values()),
                f"{run['wall_s']:.0f}",
                f"{run['load']:.0%}",
            )
        )
    worst = max(row[3] for row in losses)
    return [
        "Steps are paced to the nominal speeds of the types; starts and changes of plan are real, from warm caches.",
        "",
        *table(head, rows),
        "",
        f"Mean completion time, ours over rigid FCFS: {means['arena'] / means['fcfs']:.2f}.",
        "Ours: " + ", ".join(f"{number} {kind}" for kind, number in counts.items() if number) + ".",
        told_on(changed),
        "",
        *table(
            ("job", "final loss", "undisturbed", "difference"),
            [(name, f"{a:.4f}", f"{b:.4f}", f"{d:.1%}") for name, a, b, d in losses],
        ),
        "",
        f"Largest difference of a final loss: {worst:.1%}; {TOLERANCE:.0%} is allowed.",
    ]


if __name__ == "__main__":
    main()
