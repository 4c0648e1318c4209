"""The service under load, against an executor that runs nothing.

    python -m benchmarks.service_load [--write]

1. A thousand jobs submitted over its socket within a minute, with ``status`` asked every second: how long each
   request took. The cluster stays full, so that all of them queue and every decision sees them.
2. An hour of simulated time in which jobs come and go: the memory of the process, by ten minutes.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from arena_jax.service.protocol import call
from benchmarks._report import table, write

ROOT = Path(__file__).resolve().parents[1]
NUM_JOBS, WITHIN_S = 1000, 60.0


def serve(state: str) -> None:
    """A service on the stub machine, in real time, until it is killed."""
    from arena_jax.service.service import Options, Service
    from tests.service.stub import CLUSTER, StubExecutor, StubIndexer

    options = Options(state=Path(state), cluster=CLUSTER)
    made = Service(options, lambda store: (StubExecutor(time.time), StubIndexer()))  # type: ignore[arg-type]
    made.start()
    made.run()


def burst() -> dict[str, float]:
    """Seconds of the requests: median, 99th percentile, longest."""
    from tests.service.stub import recipe

    folder = Path(tempfile.mkdtemp(prefix="arena-jax-load-"))
    state = folder / "state"
    code = f"from benchmarks.service_load import serve; serve({str(state)!r})"
    service = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not (state / "service.json").exists():
        time.sleep(0.1)
    submits, statuses = [], []
    began = asked = time.monotonic()
    try:
        for number in range(NUM_JOBS):
            time.sleep(max(0.0, began + number * WITHIN_S / NUM_JOBS - time.monotonic()))
            spec = recipe(f"job{number % 7}", steps=100_000 + number)
            at = time.monotonic()
            call(state, {"do": "submit", "job": spec.to_json()})
            submits.append(time.monotonic() - at)
            if time.monotonic() - asked > 1.0:
                asked = time.monotonic()
                call(state, {"do": "status"})
                statuses.append(time.monotonic() - asked)
        took_s = time.monotonic() - began
        time.sleep(3)
        counts = call(state, {"do": "status"})["counts"]
    finally:
        service.kill()
        service.wait()
    times = sorted(submits + statuses)
    return {
        "num_jobs": NUM_JOBS,
        "seconds": took_s,
        "median_s": times[len(times) // 2],
        "p99_s": times[int(len(times) * 0.99)],
        "max_s": times[-1],
        "max_status_s": max(statuses),
        "queued_after": sum(counts.values()) - counts.get("planning", 0),
    }


def hour() -> list[tuple[int, float, int]]:
    """(minutes, MiB of this process, jobs so far) of a simulated hour in which a job comes every ten seconds."""
    from tests.service.stub import Bench, recipe

    bench = Bench(Path(tempfile.mkdtemp(prefix="arena-jax-hour-")))
    seen = []
    for second in range(3600):
        if second % 10 == 0:
            bench.submit(recipe(f"job{second % 70}", steps=50))
        bench.loop.tick()
        bench.clock.now += 1
        bench.executor.runs = {n: run for n, run in bench.executor.runs.items() if run.alive or n in bench.loop.jobs}
        if second % 600 == 599:
            gc.collect()
            seen.append((second // 60 + 1, _resident_mib(), len(bench.store.jobs())))
    return seen


def _resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise SystemExit("no VmRSS here")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the results under benchmarks/results")
    options = parser.parse_args(argv)
    memory = hour()
    requests = burst()
    lines = [
        f"{NUM_JOBS} submits in {requests['seconds']:.0f} s, and `status` every second:",
        "",
        *table(
            ("median s", "99 % s", "longest s", "longest status s", "taken up after"),
            [
                [f"{requests[k]:.3f}" for k in ("median_s", "p99_s", "max_s", "max_status_s")]
                + [requests["queued_after"]]
            ],
        ),
        "",
        "An hour of simulated time, a job every 10 s:",
        "",
        *table(("minutes", "MiB", "jobs"), [(minutes, f"{mib:.1f}", jobs) for minutes, mib, jobs in memory]),
    ]
    data = {"requests": requests, "memory": [list(row) for row in memory]}
    if options.write:
        write("service_load", title="The cluster service under load", lines=lines, data=data)
    else:
        print("\n".join(lines))
        print(json.dumps(data))


if __name__ == "__main__":
    main()
