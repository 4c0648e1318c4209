"""``arena-jax serve``: the cluster service."""

import signal
import time
import tomllib
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from arena_jax.cli import console
from arena_jax.cli.service_options import state_option
from arena_jax.errors import UsageError

if TYPE_CHECKING:
    from arena_jax.scheduler import Cluster
    from arena_jax.service.executor import Executor

DEFAULT_PORT = 8642
# For a cluster to answer, which may have to be started.
RAY_WAIT_S = 120.0


@click.command(short_help="Run the cluster service: a queue of jobs on a cluster.")
@click.option(
    "--cluster",
    "cluster_file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Cluster file (TOML): device types, nodes, queues.",
)
@click.option(
    "--executor",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="What runs the jobs: this machine, or a Ray cluster.",
)
@click.option(
    "--ray-address",
    metavar="HOST:PORT",
    help="Of a running Ray cluster; by default one is started on this machine.",
)
@click.option("--policy", default="arena", show_default=True, help="Scheduling policy; docs/policies.md has them.")
@click.option(
    "--port",
    type=click.IntRange(-1, 65535),
    default=DEFAULT_PORT,
    show_default=True,
    help="Of the page and metrics on 127.0.0.1; 0: any, -1: none.",
)
@click.option(
    "--restart-s",
    type=click.FloatRange(min=0),
    default=20.0,
    show_default=True,
    metavar="SECONDS",
    help="What a new process is thought to cost until it was measured.",
)
@click.option(
    "--resize-s",
    type=click.FloatRange(min=0),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="The same, for a change inside a process.",
)
@click.option(
    "--hang-s",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    metavar="SECONDS",
    help="A training that says nothing for so long is killed.",
)
@state_option
@console.json_option
def command(
    cluster_file: Path,
    executor: str,
    ray_address: str | None,
    policy: str,
    port: int,
    restart_s: float,
    resize_s: float,
    hang_s: float,
    state: Path | None,
    as_json: bool,
) -> None:
    """Serve a queue of jobs on a cluster until Ctrl-C.

    Jobs run as processes of this machine, or of the nodes of a Ray cluster, on virtual CPU devices. They go on
    when the service ends, and are taken up again when it is started with the same state folder. Only you can
    reach it: through a socket in that folder, and a read-only page on 127.0.0.1.
    """
    from arena_jax.scheduler import Cluster
    from arena_jax.service.local_index import LocalIndexer
    from arena_jax.service.protocol import state_folder
    from arena_jax.service.queues import Queues
    from arena_jax.service.rules import Rules
    from arena_jax.service.service import Options, Service, facts

    cluster = Cluster.load(cluster_file)
    tables = tomllib.loads(cluster_file.read_text(encoding="utf-8"))
    folder = state_folder(state)
    options = Options(
        state=folder,
        cluster=cluster,
        queues=Queues.from_tables(tables.get("queues", {}), source=str(cluster_file)),
        policy=policy,
        rules=Rules(change_cost_s=restart_s, resize_cost_s=resize_s, hang_s=hang_s),
        port=None if port < 0 else port,
        label=nominal_label(cluster),
    )
    if ray_address is not None and executor != "ray":
        raise UsageError("--ray-address is for the ray executor", hint="add --executor ray")
    indexer = LocalIndexer(folder, cluster, tables)
    service = Service(
        options, lambda store: (make_executor(executor, folder, cluster, ray_address), indexer), note=_note
    )
    service.start()
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: _end(service.stop, frame))
        console.note(f"serving {cluster.num_devices} devices under {policy}; state in {folder}")
        if options.label:
            console.note(options.label)
        if service.url:
            console.note(f"page: {service.url}")
        if as_json:
            console.emit_json(facts(service))
        service.run()
    finally:
        indexer.close()
        service.close()
        alive = [job.id for job in service.loop.jobs.values() if job.live]
        service.executor.close(idle=not alive)
    if alive:
        console.note(f"{', '.join(alive)} go on without the service; start it again to take them up")


def make_executor(name: str, state: Path, cluster: "Cluster", ray_address: str | None) -> "Executor":
    """The executor of a name; raise :class:`UsageError` where it cannot run here."""
    if name == "local":
        from arena_jax.service.local import LocalExecutor

        return LocalExecutor(state, cluster)
    from arena_jax.service.job_folder import check_virtual
    from arena_jax.service.ray_executor import RayExecutor
    from arena_jax.service.ray_link import Given, RayProcess, Where, check_installed
    from arena_jax.service.ray_local import LocalRay

    check_installed()
    check_virtual(cluster, name)
    where: Where = Given(ray_address) if ray_address is not None else LocalRay(state, cluster)
    link = RayProcess(where, state / "ray.log")
    console.note("connecting to Ray")
    try:
        link.wait(RAY_WAIT_S)
    except BaseException:
        link.close(idle=False)
        raise
    return RayExecutor(state, cluster, link)


def nominal_label(cluster: "Cluster") -> str:
    """What must be said of a cluster whose types are not what their numbers say."""
    paced = [name for name in cluster.types if cluster.catalogue[name].threads is not None]
    if not paced:
        return ""
    return f"Virtual CPU devices: steps on {', '.join(paced)} are paced to nominal speeds."


def _end(stop: object, frame: FrameType | None) -> None:
    assert callable(stop)
    stop()


def _note(text: str) -> None:
    console.note(f"{time.strftime('%H:%M:%S')} {text}")
