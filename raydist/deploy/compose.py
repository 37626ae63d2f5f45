"""A compose file: two containers on one machine, each a node of one Ray cluster; the first one has the driver, too.

Runs anywhere. It is to try a cluster's behaviour, such as the loss of a node (`docker compose kill node`), without one.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from raydist.deploy.nodes import Nodes
from raydist.errors import UsageError
from raydist.spec import JobSpec

_GCS, _WORK, _RUNS, _TOKEN, _JOIN_S = 6379, "/work", "/runs", "RAY_AUTH_TOKEN", 120


def compose(job: JobSpec, image: str, train: Sequence[str]) -> str:
    """The text of compose.yaml. `train`: the arguments of `raydist train`, relative to the folder with the file. Raises UserError
    as `Nodes.of` does, and UsageError for an image without a name."""
    if not image or any(each.isspace() for each in image):
        raise UsageError(f"--image {image!r}: is no name of an image", "write --image registry/raydist:1.0")
    has = job.cluster.resources
    here = has.model_copy(update={"nodes": 2, "cpus": None, "gpus": has.gpus or 0})
    nodes = Nodes.of(job.model_copy(update={"cluster": job.cluster.model_copy(update={"resources": here})}))
    start = [*(f"--{name}={value}" for name, value in nodes.start.items()), "--disable-usage-stats"]
    environment = {"RAY_AUTH_MODE": "token", _TOKEN: f"${{{_TOKEN}:?put one into .env: openssl rand -hex 32}}"}
    common: dict[str, Any] = {
        "image": image,
        "working_dir": _WORK,
        "environment": environment,
        "volumes": [f".:{_WORK}", f"./runs:{_RUNS}"],
        "shm_size": f"{math.ceil(nodes.shm_gib or 2)}gb",
        "init": True,
        "stop_grace_period": f"{nodes.grace_s}s",
    }
    if nodes.gpus:
        device = {"driver": "nvidia", "count": nodes.gpus, "capabilities": ["gpu"]}
        common["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    first = ["ray", "start", "--head", "--port", str(_GCS), "--dashboard-host", "0.0.0.0", *start]
    where = ["--storage", _RUNS, "--address", f"head:{_GCS}", "--wait-for-nodes", str(_JOIN_S)]
    # A driver needs a node of Ray on its own host, so it is in the head's container.
    driver = f"{shlex.join(first)} && exec {shlex.join(['raydist', 'train', *train, *where])}"
    healthy = {"test": ["CMD", "ray", "health-check", "--address", f"head:{_GCS}"], "interval": "5s", "retries": 24}
    join = ["ray", "start", "--address", f"head:{_GCS}", *start, "--block"]
    services: dict[str, Mapping[str, Any]] = {
        "head": common
        | {
            "command": ["sh", "-c", driver.replace("$", "$$")],  # compose puts its own variables in place of $NAME
            "hostname": "head",
            "ports": ["127.0.0.1:8265:8265"],
            "healthcheck": healthy,
        },
        "node": common
        | {
            "command": join,
            # The image's health check asks the cluster at RAY_ADDRESS; this container has no GCS of its own.
            "environment": environment | {"RAY_ADDRESS": f"head:{_GCS}"},
            "depends_on": {"head": {"condition": "service_healthy"}},
        },
    }
    made_for = shlex.join(train).replace("\n", "\n# ")
    header = f"# Made for: raydist train {made_for}\n# A token: echo {_TOKEN}=$(openssl rand -hex 32) >> .env\n"
    return header + yaml.safe_dump({"services": services}, sort_keys=False)
