"""A run that may grow asks Ray's autoscaler for what it lacks, and takes that back. It is real, its nodes are raylets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_nodes import Run
from tests.hosts import Cluster, Host, Hosts

MEMORY = 100_000_000
UNUSED: dict[str, Any] = {
    "auth": {}, "docker": {}, "file_mounts": {}, "cluster_synced_files": [], "file_mounts_sync_continuously": False,
    **{f"{name}_commands": [] for name in ("initialization", "setup", "head_setup", "worker_setup")},
    **{f"{name}_start_ray_commands": [] for name in ("head", "worker")}, "rsync_exclude": [], "rsync_filter": [],
}  # fmt: skip
"""Of an autoscaler's file, for machines that are to be set up."""
CONFIG = {
    "cluster_name": "autoscaled",
    "provider": {"type": "fake_multinode", "use_node_id_as_ip": True},  # a node is a raylet on the head's host
    "max_workers": 3,
    "upscaling_speed": 1.0,
    "idle_timeout_minutes": 0.05,
    "head_node_type": "ray.head.default",
    "available_node_types": {
        "ray.head.default": {"resources": {"CPU": 1}, "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": {"CPU": 1, "object_store_memory": MEMORY},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 3,
        },
    },
    **UNUSED,
}


class Autoscaled(Cluster):
    """A cluster of one host, whose head has an autoscaler."""

    def __init__(self, hosts: Hosts, config: Path) -> None:
        super().__init__(hosts, env={"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"})
        config.write_text(json.dumps(CONFIG))
        self._config = config

    def _start(self, host: Host, *options: str, cpus: int | None = None) -> None:
        super()._start(host, *options, f"--autoscaling-config={self._config}", cpus=cpus)

    @property
    def size(self) -> int:
        """Nodes that live."""
        return sum(alive for _, alive in self.nodes().values())


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Autoscaled]:
    """One node of one CPU, and more on request."""
    config = tmp_path_factory.mktemp("autoscaler") / "config.json"
    with Hosts(1) as hosts, Autoscaled(hosts, config) as cluster:
        yield cluster


def test_a_run_asks_for_what_it_lacks_and_takes_it_back(project: Any, cluster: Autoscaled) -> None:
    """It begins with the one worker there is room for, and gets no more nodes than it may have workers; they go when it has ended,
    also when its driver was killed.
    """
    plain = ["--set", "cluster.workers=[1,2]", "--set", "train.steps=24", "--set", "model.dropout=0"]
    grows = Run(project, cluster, "asks", *plain)
    grows.until(lambda: any(e["action"] == "grow" for e in grows.events("decision")))
    grows.go()
    sizes = [row["world_size"] for row in grows.finish()]
    assert (sizes[0], sizes[-1]) == (1, 2)
    assert len(cluster.nodes()) == 2, "those that are gone count"
    cluster.wait_until(lambda: cluster.size == 1)

    killed = Run(project, cluster, "asks-and-dies", *plain)
    killed.until(lambda: cluster.size == 2)
    killed.process.kill()
    killed.process.communicate()
    cluster.wait_until(lambda: cluster.size == 1)
