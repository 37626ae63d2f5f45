"""Which nodes are slow follows from the measurements alone."""

from __future__ import annotations

from typing import Any

import pytest

from raydist.cluster.check import everywhere, slow, table
from raydist.cluster.preflight import check_resources
from raydist.report.check import said, show
from raydist.spec import parse


def rank(node: str, matmul: float) -> dict[str, Any]:
    return {"node_ip": node, "matmul": matmul, "memory": 2e12, "to_device": 5e10}


def measured() -> list[dict[str, Any]]:
    """Three nodes with two GPUs each; one GPU of c is slow, and the link between b and the others is."""
    ranks = [rank(n, 5e14) for n in "aabbc"] + [rank("c", 3e14)]
    bandwidth = [[0.0, 1e9, 2.5e10], [1e9, 0.0, 1e9], [2.5e10, 1e9, 0.0]]
    pairs = {"between": "nodes", "names": ["a", "b", "c"], "bandwidth": bandwidth}
    has = {node: {"gpus": 2, "storage_mb_s": 800.0} for node in "abc"}
    return table(has, {"ranks": ranks, "pairs": pairs})


def test_the_slow_nodes_are_named() -> None:
    """A node is as fast as its slowest rank; a slow link makes the node slow that has it to most others, and no other."""
    found = slow(measured(), 0.8)
    assert [(each["node"], each["rate"]) for each in found] == [("c", "matmul"), ("b", "link")]
    assert said(found[0]) == "node c: 300 TFLOP/s of a matrix product, the median is 500"
    assert slow(measured(), 0.05) == []


@pytest.mark.parametrize(
    ("nodes", "ranks"),
    [
        ([{"CPU": 8.0, "GPU": 4.0}, {"CPU": 8.0, "GPU": 3.0}, {"CPU": 8.0}], 7),
        ([{"CPU": 8.0}, {"CPU": 1.0}, {"CPU": 0.0}], 2),
    ],
)
def test_every_node_is_measured_whatever_the_mesh(nodes: list[dict[str, float]], ranks: int) -> None:
    """A job of 4 workers in a pipeline of 2 tensor groups: a rank for each GPU all the same, or each node, and these fit."""
    job = {"data": {"source": "x"}, "train": {"steps": 1, "global_batch": 8}, "cluster": {"workers": 4}}
    asked = everywhere(parse({**job, "parallel": {"pipeline": 2, "tensor": 2}}), nodes)
    assert asked.cluster.most == ranks
    assert check_resources(asked, nodes) == []


def test_the_text_says_how_to_leave_them_out(capsys: Any) -> None:
    """The table has a row a node, and then the field to set."""
    show({"nodes": measured(), "differs": [], "slow": slow(measured(), 0.8)})
    out = capsys.readouterr().out
    assert "cluster.resources.exclude=[b, c]" in out
    assert "node b: 1 GB/s to other nodes, the median is 13" in out
