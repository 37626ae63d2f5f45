"""A compose file: two containers on one machine, each a node of one Ray cluster, and one with the driver.

Runs anywhere. It is to try a cluster's behaviour, such as the loss of a node (`docker compose kill node`), without one.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from raydist.spec import JobSpec

_GCS, _WORK, _RUNS, _TOKEN, _JOIN_S = 6379, "/work", "/runs", "RAY_AUTH_TOKEN", 120


def compose(job: JobSpec, image: str, train: Sequence[str]) -> str:
    """The text of compose.yaml. `train`: the arguments of `raydist train`, relative to the folder with the file."""
    cluster, has = job.cluster, job.cluster.resources
    holds = math.ceil((cluster.most + cluster.spares) / 2)
    gpus = has.gpus or 0
    start = [
        "--num-cpus",
        str(math.ceil(holds * cluster.cpus_per_worker)),
        "--num-gpus",
        str(gpus),
        "--disable-usage-stats",
        "--block",
    ]
    common: dict[str, Any] = {
        "image": image,
        "working_dir": _WORK,
        "environment": {"RAY_AUTH_MODE": "token", _TOKEN: f"${{{_TOKEN}:?put one into .env: openssl rand -hex 32}}"},
        "volumes": [f".:{_WORK}", f"./runs:{_RUNS}"],
        "shm_size": f"{math.ceil(has.shm_gib or 2)}gb",
        "init": True,
        "stop_grace_period": "2m",
    }
    if gpus:
        device = {"driver": "nvidia", "count": gpus, "capabilities": ["gpu"]}
        common["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    first = ["ray", "start", "--head", "--port", str(_GCS), "--dashboard-host", "0.0.0.0", *start]
    driver = [
        "raydist",
        "train",
        *train,
        "--storage",
        _RUNS,
        "--address",
        f"head:{_GCS}",
        "--wait-for-nodes",
        str(_JOIN_S),
    ]
    services: dict[str, Mapping[str, Any]] = {
        "head": common | {"command": first, "hostname": "head", "ports": ["127.0.0.1:8265:8265"]},
        "node": common | {"command": ["ray", "start", "--address", f"head:{_GCS}", *start], "depends_on": ["head"]},
        "train": {k: v for k, v in common.items() if k != "deploy"}
        | {"command": driver, "depends_on": ["head", "node"]},
    }
    header = (
        f"# Made for: raydist train {shlex.join(train)}\n# A token: echo {_TOKEN}=$(openssl rand -hex 32) >> .env\n"
    )
    return header + yaml.safe_dump({"services": services}, sort_keys=False)
