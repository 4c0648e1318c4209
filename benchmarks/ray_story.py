"""The cluster service on a Ray cluster of four nodes: six trainings of four families, and a node that is killed.

    python -m benchmarks.ray_story [--write] [--undisturbed FILE]          # needs the extra [ray]

Two nodes of each of two virtual device types, all on this machine (``ray.cluster_utils``). Each training is one
process on every node of its allocation, under ``jax.distributed``. The trainings come one after the other, and the
policy grows, shrinks and moves them. When the last has come, a node is killed, as a machine is that loses its power:
one of a training that spans two, if there is such a training. What is compared are all losses, with those of the
same trainings in one process each, undisturbed. The last line is one JSON object; the exit code is 1 when a training
did not finish or its losses differ by more than is allowed.
"""

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arena_jax.grid import Allocation
from arena_jax.scheduler import Cluster
from arena_jax.service.own_processes import processes_of
from arena_jax.service.store import Store
from benchmarks._report import table, write
from benchmarks.service_demo import ENDED, OVERRIDES, ROOT, Served, plan_ahead, told_on, went_on

NODES = ("quick/0", "quick/1", "slow/0", "slow/1")
DEVICES = 2
CLUSTER = """
[types.quick]
threads = 1
peak_flops = 1.4e8
memory_bandwidth = 1.4e8

[types.slow]
threads = 1
peak_flops = 0.7e8
memory_bandwidth = 0.7e8

[[nodes]]
type = "quick"
count = 2
devices = 2

[[nodes]]
type = "slow"
count = 2
devices = 2
"""
# What a killed node takes with it is what was made since the last checkpoint.
MORE = ("checkpoint.every=5",)


@dataclass(frozen=True, kw_only=True)
class Training:
    """One training of the story: its family, steps, seconds of its arrival, fewest and most devices."""

    recipe: str
    steps: int
    arrival_s: float
    least: int
    most: int


# The first two have room to span two nodes. Long enough that changes pay, of which each is a start of processes.
JOBS = (
    Training(recipe="gpt_tiny", steps=100, arrival_s=0, least=2, most=4),
    Training(recipe="bert_tiny", steps=60, arrival_s=8, least=2, most=4),
    Training(recipe="moe_tiny", steps=40, arrival_s=45, least=1, most=4),
    Training(recipe="wide_resnet_tiny", steps=80, arrival_s=90, least=1, most=1),
    Training(recipe="gpt_tiny", steps=15, arrival_s=120, least=1, most=1),
    Training(recipe="bert_tiny", steps=25, arrival_s=150, least=1, most=4),
)
# A node is killed when all have come and a training that spans it has made so many steps; when none has for so many
# seconds, a node of any that has.
KILL_AT_STEP = 12
KILL_ANY_S = 60.0
# What a change is thought to cost before one was measured: each is a new start of every process.
RESTART_S = 20.0
# Largest relative difference of a loss; float32 sums in another order, and BatchNorm amplifies it.
TOLERANCES = {"gpt_tiny": 1e-3, "bert_tiny": 1e-3, "moe_tiny": 1e-3, "wide_resnet_tiny": 5e-2}
CHANGES = ("grow", "shrink", "move", "migrate")
KINDS = ("start", "resume", *CHANGES, "pause", "crash", "finish", "fail")


class Nodes:
    """Four Ray nodes and a head, as processes of this machine."""

    def __init__(self) -> None:
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # or trainings get the least of a busy machine
        from ray import cluster_utils

        small = {"num_cpus": 0, "object_store_memory": 80_000_000}
        self._cluster = cluster_utils.Cluster(
            initialize_head=True, head_node_args={**small, "include_dashboard": False}
        )
        for name in NODES:
            self._cluster.add_node(wait=False, resources={f"arena-{name.partition('/')[0]}": DEVICES}, **small)
        self._cluster.wait_for_nodes(120)
        self.address = self._cluster.address

    def kill(self, ray_id: str) -> None:
        """End all processes of a node at once."""
        node = next(node for node in self._cluster.worker_nodes if node.node_id == ray_id)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


def undisturbed(jobs: Sequence[Training], known: Mapping[str, list[float]]) -> dict[str, list[float]]:
    """Losses of each training by itself, in one process on two devices; those ``known`` are not run again."""
    found = dict(known)
    folder = tempfile.mkdtemp(prefix="arena-jax-alone-")
    for job in jobs:
        if _alone(job) in found:
            continue
        print(f"undisturbed: {_alone(job)}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "arena_jax", "train", job.recipe, *OVERRIDES[job.recipe]]
        command += [f"steps={job.steps}", "plan.grid=cpu:2/s1", f"checkpoint.dir={folder}/{job.recipe}-{job.steps}"]
        done = subprocess.run([*command, "--json"], capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise SystemExit(done.stderr)
        found[_alone(job)] = json.loads(done.stdout.splitlines()[-1])["losses"]
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _alone(job: Training) -> str:
    """What tells undisturbed runs apart: learning rates follow the number of steps."""
    return f"{job.recipe}, {job.steps} steps"


def play(jobs: Sequence[Training], state: Path, cluster: Path, most_s: float) -> dict[str, Any]:
    """The story; returns what happened."""
    began = time.monotonic()
    nodes = Nodes()
    killed: dict[str, Any] = {}
    served = None

    def submit(job: Training) -> str:
        assert served is not None
        return served.submit(job.recipe, job.steps, *MORE, least=job.least, most=job.most)

    try:
        ready_s = time.monotonic() - began
        costs = ("--restart-s", str(RESTART_S), "--resize-s", str(RESTART_S))
        served = Served(state, cluster, "arena", "--executor", "ray", "--ray-address", nodes.address, *costs)
        print("planning first", file=sys.stderr, flush=True)
        plan_ahead(served, NODES, lambda: [submit(job) for job in jobs])
        planned_s = time.monotonic() - began - ready_s
        began, began_at = time.monotonic(), time.time()
        ids: list[str] = []
        said = ""
        while True:
            for job in jobs[len(ids) :]:
                if job.arrival_s <= time.monotonic() - began:
                    ids.append(submit(job))
            shown = [job for job in served.jobs() if job["id"] in ids]
            line = ", ".join(f"{job['id']} {job['allocation'] or job['state']} {job['step']}" for job in shown)
            if line != said:
                said = line
                print(f"{time.monotonic() - began:4.0f} s: {line}", file=sys.stderr, flush=True)
            late_s = time.monotonic() - began - jobs[-1].arrival_s
            name = _victim(shown, 2 if late_s < KILL_ANY_S else 1)
            if not killed and len(ids) == len(jobs) and name is not None:
                ray_id = json.loads((state / "ray.json").read_text())["nodes"][name]
                killed = {
                    "node": name,
                    "at_s": time.monotonic() - began,
                    "held": {job["id"]: job["allocation"] for job in shown if name in job["nodes"]},
                }
                print(f"{killed['at_s']:4.0f} s: killing {name}", file=sys.stderr, flush=True)
                nodes.kill(ray_id)
            if len(ids) == len(jobs) and all(job["state"] in ENDED for job in shown):
                break
            if time.monotonic() - began > most_s:
                raise SystemExit(f"not done after {most_s:.0f} s: {line}; see {state}")
            time.sleep(0.5)
        wall_s = time.monotonic() - began
    finally:
        if served is not None:
            served.close()
        nodes.close()
    store = Store(state / "state.sqlite")
    events = [
        {"time": round(e["time"] - began_at, 1), **{k: e.get(k) for k in ("job", "kind", "from", "to", "node", "why")}}
        for e in store.events(last=100_000)
        if e["kind"] == "node lost" or (e["kind"] in KINDS and e["job"] in ids)
    ]
    return {
        "jobs": shown,
        "killed": killed,
        "cluster_ready_s": ready_s,
        "planned_s": planned_s,
        "wall_s": wall_s,
        "events": events,
        "counts": dict(Counter(e["kind"] for e in events)),
        "went_on": went_on(events, Cluster.load(cluster)),
        "spanned": _spans(events, Cluster.load(cluster)),
        "losses": {job["id"]: {step: loss for step, _, loss, _ in store.points(job["number"])} for job in shown},
        "left": processes_of(f"{state}/jobs/", prefix=True),
    }


def _victim(jobs: Sequence[Mapping[str, Any]], num_nodes: int) -> str | None:
    """The last node of the first job that trains on at least so many and is some way along."""
    for job in jobs:
        if job["state"] == "running" and job["step"] >= KILL_AT_STEP and len(job["nodes"]) >= num_nodes:
            return str(job["nodes"][-1])
    return None


def _spans(events: Sequence[Mapping[str, Any]], cluster: Cluster) -> dict[str, int]:
    """The most nodes of each job, where it had more than one: a process ran on each."""
    most: dict[str, int] = {}
    for event in events:
        if event["to"]:
            num_nodes = Allocation.parse(event["to"], cluster.catalogue).num_nodes
            most[event["job"]] = max(most.get(event["job"], 1), num_nodes)
    return {job: number for job, number in most.items() if number > 1}


def compare(
    jobs: Sequence[Training], played: Mapping[str, Any], alone: Mapping[str, Sequence[float]]
) -> list[dict[str, Any]]:
    """For each job: how many losses were compared, the last of both runs, and how far they are apart."""
    rows = []
    for job, shown in zip(jobs, played["jobs"], strict=True):
        losses, wanted = played["losses"][shown["id"]], alone[_alone(job)]
        worst = max((abs(losses[i] - loss) / abs(loss) for i, loss in enumerate(wanted, 1) if i in losses), default=0.0)
        whole = shown["state"] == "finished" and sorted(losses) == list(range(1, job.steps + 1))
        rows.append(
            {
                "job": shown["id"],
                "state": shown["state"],
                "compared": len(losses),
                "final": losses.get(job.steps),
                "undisturbed": wanted[-1],
                "worst": worst,
                "allowed": TOLERANCES[job.recipe],
                "fine": whole and worst <= TOLERANCES[job.recipe],
            }
        )
    return rows


def _lines(played: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    killed, counts, spanned = played["killed"], played["counts"], played["spanned"]
    held = ", ".join(f"{job} ran on it ({allocation})" for job, allocation in killed["held"].items())
    return [
        "Four Ray nodes of two devices on this machine; a process on each node of an allocation. Steps are paced to",
        "nominal speeds; starts and compilations are real.",
        "",
        *table(
            ("second", "job", "what", "from", "to or why"),
            [
                (f"{e['time']:.0f}", e["job"] or e["node"], e["kind"], e["from"] or "", e["to"] or e["why"] or "")
                for e in played["events"]
            ],
        ),
        "",
        f"{killed['node']} was killed at {killed['at_s']:.0f} s; {held}.",
        "",
        ", ".join(f"{counts.get(kind, 0)} {kind}" for kind in KINDS if kind in CHANGES or counts.get(kind)) + ".",
        told_on(played["went_on"]),
        "On several nodes at some time, with a process on each: " + ", ".join(spanned) + ".",
        "",
        *table(
            ("job", "state", "losses compared", "final loss", "undisturbed", "largest difference", "allowed"),
            [
                (
                    *(row["job"], row["state"], row["compared"]),
                    "-" if row["final"] is None else f"{row['final']:.4f}",
                    *(f"{row['undisturbed']:.4f}", f"{row['worst']:.1e}", f"{row['allowed']:.0e}"),
                )
                for row in rows
            ],
        ),
        "",
        "Undisturbed: one process each, on two devices.",
        f"Planned in {played['planned_s']:.0f} s, played in {played['wall_s']:.0f} s.",
        f"Processes left behind: {len(played['left'])}.",
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the results under benchmarks/results")
    parser.add_argument("--undisturbed", type=Path, help="file that keeps the undisturbed losses between calls")
    parser.add_argument("--only-undisturbed", action="store_true", help="make that file, and no more")
    parser.add_argument("--jobs", type=int, default=len(JOBS), help="only the first so many")
    parser.add_argument("--most-s", type=float, default=900.0, help="give up after so many seconds")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("ray") is None:
        print("skipped: it needs the extra [ray]")
        return
    file, jobs = options.undisturbed, JOBS[: options.jobs]
    alone = undisturbed(jobs, json.loads(file.read_text()) if file is not None and file.exists() else {})
    if file is not None:
        file.write_text(json.dumps(alone))
    if options.only_undisturbed:
        return
    folder = Path(tempfile.mkdtemp(prefix="arena-jax-ray-story-"))
    (folder / "cluster.toml").write_text(CLUSTER)
    played = play(jobs, folder / "s", folder / "cluster.toml", options.most_s)
    if not played["killed"]:
        raise SystemExit("no node was killed: no training was far enough when the last had come")
    rows = compare(jobs, played, alone)
    lines = _lines(played, rows)
    if options.write:
        data = {**played, "losses": None, "undisturbed": alone, "compared": rows}
        write("ray", title="Six trainings on a Ray cluster, and a node killed under them", lines=lines, data=data)
    else:
        print("\n".join(lines))
    shutil.rmtree(folder, ignore_errors=True)
    told = ("killed", "counts", "went_on", "spanned", "wall_s")
    print(json.dumps({"compared": rows, **{key: played[key] for key in told}}))
    if not all(row["fine"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
