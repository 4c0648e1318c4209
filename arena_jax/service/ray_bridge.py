"""The process that is connected to Ray, for a service that is not: ``python -m arena_jax.service.ray_bridge``.

Over the line it is given it hears ``create`` and ``kill``, and twice a second says which nodes and actors there
are. It holds nothing: actors are detached, and found by their names by whoever comes next.
"""

import logging
import os
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from arena_jax.processes.line import Line, Message
from arena_jax.service.ray_actor import NodeProcess

NAMESPACE = "arena-jax"
_SAY_S = 0.5


def main(line: Line, address: str, answered: int) -> None:
    """Connect to the cluster at ``address``, and serve the line until its other end is gone."""
    heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_hear, args=(line, heard), daemon=True).start()
    import ray

    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    said_s = 0.0
    while True:
        wait_s = max(0.0, said_s + _SAY_S - time.monotonic())
        try:
            message = heard.get(timeout=wait_s)
        except queue.Empty:
            line.send(say="seen", answered=answered, **look())
            said_s = time.monotonic()
            continue
        if message["do"] == "create":
            create(message)
        else:
            with suppress(ValueError):  # there is none of that name
                ray.kill(ray.get_actor(message["name"]))
        answered = message["number"]


def look() -> dict[str, Any]:
    """Nodes and named actors that are alive."""
    import ray

    nodes = [
        {"id": node["NodeID"], "host": node["NodeManagerHostname"], "resources": node["Resources"]}
        for node in ray.nodes()
        if node["Alive"]
    ]
    return {"nodes": nodes, "actors": ray.util.list_named_actors()}


def create(message: Message) -> None:
    """Start an actor; on this node or not at all."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    root = str(Path(__file__).resolve().parents[2])
    actor = ray.remote(NodeProcess).options(
        name=message["name"],
        lifetime="detached",
        max_restarts=0,
        num_cpus=0,
        resources={message["resource"]: message["amount"]},
        scheduling_strategy=NodeAffinitySchedulingStrategy(message["node"], soft=False),
        # The code of this service, where the node has it at the same place; otherwise what is installed there.
        runtime_env={"env_vars": {"PYTHONPATH": root}},
    )
    try:
        actor.remote(message["folder"])
    except ValueError as error:  # it is there already
        print(f"{message['name']}: {error}", flush=True)


def _hear(line: Line, heard: "queue.SimpleQueue[Message]") -> None:
    for message in line.messages():
        heard.put(message)
    os._exit(0)  # calls of Ray may block for long


if __name__ == "__main__":
    main(Line(socket.socket(fileno=int(sys.argv[1]))), sys.argv[2], int(sys.argv[3]))
