"""The cluster service on a Ray cluster of four nodes: a node is killed while trainings span it.

    python -m benchmarks.ray_story [--write] [--undisturbed FILE]          # needs the extra [ray]

Two nodes of each of two virtual device types, all on this machine (``ray.cluster_utils``). Each training is one
process on every node of its allocation, under ``jax.distributed``. When the first has made some steps on two nodes,
one of these is killed, as a machine is that loses its power. What is compared are all losses, with those of the
same trainings in one process each, undisturbed. The last line is one JSON object.
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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from arena_jax.service.own_processes import processes_of
from arena_jax.service.store import Store
from benchmarks._report import table, write
from benchmarks.service_demo import ENDED, ROOT, Served

NODES = ("quick", "quick", "slow", "slow")
DEVICES = 2
CLUSTER = """
[types.quick]
threads = 1
peak_flops = 4e8
memory_bandwidth = 4e8

[types.slow]
threads = 1
peak_flops = 3e8
memory_bandwidth = 3e8

[[nodes]]
type = "quick"
count = 2
devices = 2

[[nodes]]
type = "slow"
count = 2
devices = 2
"""
_COMMON = ("global_batch=8", "eval.every=0", "checkpoint.every=5", "tracking.enabled=false", "plan.stages=1")
_LANGUAGE = ("model.num_layers=2", "model.hidden=32", "model.num_heads=2", "model.sequence_length=32", *_COMMON)
# Recipe, overrides, steps, fewest and most devices. The first must span two nodes, wherever it is.
JOBS = (
    ("gpt_tiny", _LANGUAGE, 60, 4, 4),
    ("bert_tiny", _LANGUAGE, 60, 2, 4),
)
# Of the first job; a node of it is killed when it has made so many.
KILL_AT = 12
# Largest relative difference of a loss; float32 sums in another order.
TOLERANCE = 1e-3
KINDS = ("start", "resume", "grow", "shrink", "move", "migrate", "pause", "crash", "finish", "fail")


class Nodes:
    """Four Ray nodes and a head, as processes of this machine."""

    def __init__(self) -> None:
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # or trainings get the least of a busy machine
        from ray.cluster_utils import Cluster

        small = {"num_cpus": 0, "object_store_memory": 80_000_000}
        self._cluster = Cluster(initialize_head=True, head_node_args={**small, "include_dashboard": False})
        for kind in NODES:
            self._cluster.add_node(wait=False, resources={f"arena-{kind}": DEVICES}, **small)
        self._cluster.wait_for_nodes(120)
        self.address = self._cluster.address

    def kill(self, ray_id: str) -> None:
        """End all processes of a node at once."""
        node = next(node for node in self._cluster.worker_nodes if node.node_id == ray_id)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


def undisturbed() -> dict[str, list[float]]:
    """Losses of each training by itself, in one process on two devices."""
    found = {}
    folder = tempfile.mkdtemp(prefix="arena-jax-alone-")
    for recipe, overrides, steps, _, _ in JOBS:
        command = [sys.executable, "-m", "arena_jax", "train", recipe, *overrides, f"steps={steps}"]
        command += ["plan.grid=cpu:2/s1", f"checkpoint.dir={folder}/{recipe}", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise SystemExit(done.stderr)
        found[recipe] = json.loads(done.stdout.splitlines()[-1])["losses"]
    shutil.rmtree(folder, ignore_errors=True)
    return found


def submit(served: Served) -> list[str]:
    """Give the service the jobs; returns their ids."""
    from arena_jax.recipe import load_recipe
    from arena_jax.service.job import Submission

    ids = []
    for recipe, overrides, steps, least, most in JOBS:
        loaded = load_recipe(recipe, [*overrides, f"steps={steps}"])
        spec = Submission(
            kind="recipe", name=recipe, recipe=loaded.to_yaml(), steps=steps, min_devices=least, max_devices=most
        )
        ids.append(str(served.ask(do="submit", job=spec.to_json())["job"]["id"]))
    return ids


def play(state: Path, cluster: Path, most_s: float) -> dict[str, Any]:
    """The story; returns what happened."""
    began = time.monotonic()
    nodes = Nodes()
    killed: dict[str, Any] = {}
    served = None
    try:
        ready_s = time.monotonic() - began
        served = Served(state, cluster, "arena", "--executor", "ray", "--ray-address", nodes.address)
        began, began_at = time.monotonic(), time.time()
        ids = submit(served)
        said = ""
        while True:
            jobs = [job for job in served.jobs() if job["id"] in ids]
            line = ", ".join(f"{job['id']} {job['allocation'] or job['state']} {job['step']}" for job in jobs)
            if line != said:
                said = line
                print(f"{time.monotonic() - began:4.0f} s: {line}", file=sys.stderr, flush=True)
            first = jobs[0]
            if not killed and first["state"] == "running" and first["step"] >= KILL_AT:
                name = first["nodes"][-1]
                ray_id = json.loads((state / "ray.json").read_text())["nodes"][name]
                killed = {
                    "node": name,
                    "at_s": time.monotonic() - began,
                    "held": {job["id"]: job["allocation"] for job in jobs if name in job["nodes"]},
                }
                print(f"{time.monotonic() - began:4.0f} s: killing {name}", file=sys.stderr, flush=True)
                nodes.kill(ray_id)
            if all(job["state"] in ENDED for job in jobs):
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
    numbers = {job["id"]: job["number"] for job in jobs}
    return {
        "jobs": jobs,
        "killed": killed,
        "cluster_ready_s": ready_s,
        "wall_s": wall_s,
        "events": [
            {
                "time": round(e["time"] - began_at, 1),
                **{k: e.get(k) for k in ("job", "kind", "from", "to", "node", "why")},
            }
            for e in store.events(last=100_000)
            if e["kind"] in (*KINDS, "node lost")
        ],
        "losses": {
            job["recipe"]: {step: loss for step, _, loss, _ in store.points(numbers[job["id"]])} for job in jobs
        },
        "left": processes_of(f"{state}/jobs/", prefix=True),
    }


def compare(played: Mapping[str, Any], alone: Mapping[str, Sequence[float]]) -> list[tuple[str, int, float, float]]:
    """Recipe, number of losses compared, final loss, largest relative difference."""
    rows = []
    for recipe, losses in played["losses"].items():
        assert sorted(losses) == list(range(1, len(alone[recipe]) + 1)), f"{recipe}: steps {sorted(losses)}"
        worst = max(abs(losses[i + 1] - loss) / abs(loss) for i, loss in enumerate(alone[recipe]))
        rows.append((recipe, len(losses), losses[len(losses)], worst))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the results under benchmarks/results")
    parser.add_argument("--undisturbed", type=Path, help="file that keeps the undisturbed losses between calls")
    parser.add_argument("--only-undisturbed", action="store_true", help="make that file, and no more")
    parser.add_argument("--most-s", type=float, default=900.0, help="give up after so many seconds")
    options = parser.parse_args(argv)
    if importlib.util.find_spec("ray") is None:
        print("skipped: it needs the extra [ray]")
        return
    file = options.undisturbed
    alone = json.loads(file.read_text()) if file is not None and file.exists() else undisturbed()
    if file is not None:
        file.write_text(json.dumps(alone))
    if options.only_undisturbed:
        return
    folder = Path(tempfile.mkdtemp(prefix="arena-jax-ray-story-"))
    (folder / "cluster.toml").write_text(CLUSTER)
    played = play(folder / "s", folder / "cluster.toml", options.most_s)
    rows = compare(played, alone)
    killed = played["killed"]
    lines = [
        "Four Ray nodes of two devices on this machine; a process on each node of an allocation. Speeds are nominal.",
        "",
        *table(
            ("second", "job", "what", "from", "to or why"),
            [
                (f"{e['time']:.0f}", e["job"] or e["node"], e["kind"], e["from"] or "", e["to"] or e["why"] or "")
                for e in played["events"]
            ],
        ),
        "",
        f"{killed['node']} was killed at {killed['at_s']:.0f} s; "
        + ", ".join(f"{job} ran on it ({allocation})" for job, allocation in killed["held"].items())
        + ".",
        "",
        *table(
            ("training", "state", "losses compared", "final loss", "largest difference"),
            [
                (recipe, job["state"], number, f"{final:.4f}", f"{worst:.1e}")
                for (recipe, number, final, worst), job in zip(rows, played["jobs"], strict=True)
            ],
        ),
        "",
        f"Against one undisturbed process each; {TOLERANCE:.0e} is allowed.",
        f"Processes left behind: {len(played['left'])}.",
    ]
    data = {**played, "losses": None, "undisturbed": alone, "compared": rows}
    if options.write:
        write("ray", title="A node of a Ray cluster killed under running trainings", lines=lines, data=data)
    else:
        print("\n".join(lines))
    shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"compared": rows, "killed": killed, "wall_s": played["wall_s"]}))


if __name__ == "__main__":
    main()
