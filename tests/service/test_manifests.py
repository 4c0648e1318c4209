"""The manifests of docs/clusters.md: whether they are what their readers take them for, and fit together."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from arena_jax.scheduler import Cluster
from arena_jax.service.ray_link import RayNode
from arena_jax.service.ray_nodes import assign

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "manifests"
CLUSTER = Cluster.load(FOLDER / "cluster.toml")
NUM_NODES = sum(group.num_nodes for group in CLUSTER.groups)


def kuberay() -> dict:
    return {part["kind"]: part for part in yaml.safe_load_all((FOLDER / "kuberay.yaml").read_text())}


def pods(parts: dict) -> dict:
    spec = parts["RayCluster"]["spec"]
    found = {group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]}
    return found | {"service": parts["Deployment"]["spec"]["template"]["spec"]}


def test_kubernetes_objects_have_what_they_need():
    parts = kuberay()
    assert {kind: part["apiVersion"] for kind, part in parts.items()} == {
        "PersistentVolumeClaim": "v1",
        "RayCluster": "ray.io/v1",
        "Deployment": "apps/v1",
    }
    assert all(part["metadata"]["name"] == "arena-jax" for part in parts.values())
    assert parts["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"]
    spec = parts["RayCluster"]["spec"]
    assert spec["headGroupSpec"]["template"]["spec"]["containers"]
    service = parts["Deployment"]["spec"]
    assert service["replicas"] == 1  # one service a state folder; a second would wait for the lock and fail
    assert service["strategy"]["type"] == "Recreate"
    assert service["selector"]["matchLabels"] == service["template"]["metadata"]["labels"]
    users = set()
    for pod in pods(parts).values():
        (container,) = pod["containers"]
        assert {"name", "image", "resources", "volumeMounts"} <= container.keys()
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() == volumes.keys()
        assert mounts["shared"] == "/shared"
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == "arena-jax"
        users.add(pod["securityContext"]["runAsUser"])
    assert len(users) == 1


def test_the_service_on_kubernetes_is_started_with_options_that_exist():
    from arena_jax.cli.serve import command

    (container,) = pods(kuberay())["service"]["containers"]
    program, verb, *arguments = [*container["command"], *container["args"]]
    assert (program, verb) == ("arena-jax", "serve")
    options = command.make_context("serve", arguments, resilient_parsing=False).params
    assert (options["executor"], options["ray_address"]) == ("ray", "arena-jax-head-svc:6379")
    names = {entry["name"] for entry in container["env"]}
    assert {"ARENA_JAX_SERVICE", "ARENA_JAX_HOME", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= names


def test_ray_nodes_on_kubernetes_make_up_the_cluster_file():
    nodes = []
    for group in kuberay()["RayCluster"]["spec"]["workerGroupSpecs"]:
        # A string in quotes of its own, since it goes through a shell.
        resources = json.loads(json.loads(group["rayStartParams"]["resources"]))
        nodes += [
            RayNode(id=f"{group['groupName']}{i}", host="", resources=resources) for i in range(group["replicas"])
        ]
    assert len(assign(CLUSTER, nodes, {})) == NUM_NODES == len(nodes)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_batch_script_is_bash():
    done = subprocess.run(["bash", "-n", FOLDER / "slurm.sbatch"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_ray_nodes_under_slurm_make_up_the_cluster_file():
    text = (FOLDER / "slurm.sbatch").read_text()
    assert text.startswith("#!/bin/bash\n")
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert {"nodes", "ntasks-per-node", "cpus-per-task", "time"} <= asked.keys()
    assert text.index("#SBATCH --signal") < text.index("set -euo")  # Slurm reads no further than the first command
    (devices,) = re.findall(r"^DEVICES=(\d+)$", text, re.MULTILINE)
    given = re.findall(r'^on "\$\{hosts\[(\d)\]\}".*--resources="(.*)"$', text, re.MULTILINE)
    nodes = [
        RayNode(id=host, host=host, resources=json.loads(value.replace("\\", "").replace("$DEVICES", devices)))
        for host, value in given
    ]
    assert len(assign(CLUSTER, nodes, {})) == NUM_NODES == len(nodes) == int(asked["nodes"])
