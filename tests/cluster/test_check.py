"""Which nodes are slow follows from the measurements alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raydist.api import training
from raydist.cluster import check, nodes
from raydist.cluster.check import everywhere, slow, table
from raydist.cluster.preflight import check_resources
from raydist.cluster.session import Session
from raydist.errors import PreflightError
from raydist.report.check import said, show
from raydist.report.starting import Starting
from raydist.run.directory import RunDir
from raydist.spec import parse


def rank(node: str, matmul: float) -> dict[str, Any]:
    return {"node_ip": node, "matmul": matmul, "memory": 2e12, "to_device": 5e10, "in_node": matmul / 1e3}


def measured() -> list[dict[str, Any]]:
    """Three nodes with two GPUs each; one GPU of c is slow, and the link between b and the others is."""
    ranks = [rank(n, 5e14) for n in "aabbc"] + [rank("c", 3e14)]
    bandwidth = [[0.0, 1e9, 2.5e10], [1e9, 0.0, 1e9], [2.5e10, 1e9, 0.0]]
    pairs = {"names": ["a", "b", "c"], "bandwidth": bandwidth}
    has = {node: {"gpus": 2, "storage_mb_s": 800.0} for node in "abc"}
    return table(has, {"ranks": ranks, "pairs": pairs})


def test_the_slow_nodes_are_named() -> None:
    """A node is as fast as its slowest rank; a slow link makes the node slow that has it to most others, and no other."""
    found = slow(measured(), 0.8)
    assert [(each["node"], each["rate"]) for each in found] == [("c", "matmul"), ("c", "in_node"), ("b", "link")]
    assert said(found[0]) == "node c: 300 TFLOP/s of a matrix product, the median is 500"
    assert said(found[1]) == "node c: 300 GB/s between its GPUs, the median is 500"
    assert slow(measured(), 0.05) == []


def test_a_node_alone_has_the_rate_between_its_gpus() -> None:
    """Eight GPUs of one node: the slowest one's rate to the others; there is no link to compare."""
    ranks = [rank("a", 5e14) for _ in range(7)] + [rank("a", 5e14) | {"in_node": 4e10}]
    (row,) = table({}, {"ranks": ranks, "pairs": {"names": [], "bandwidth": []}})
    assert (row["ranks"], row["in_node"], row["link"]) == (8, 40.0, None)


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


def test_a_start_without_the_slow_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--exclude-slow` measures, names each slow node, and leaves it out besides those of the job. It is an error if the others
    have no room. A private Ray has no other nodes, and is not measured."""
    there = [
        {"NodeID": name, "NodeManagerAddress": name, "Alive": True, "Resources": {"CPU": 2.0}, "Labels": {}}
        for name in "abcd"
    ]
    monkeypatch.setattr(nodes, "listed", lambda: there)
    monkeypatch.setattr(nodes, "unreachable", set)
    monkeypatch.setattr(check, "run", lambda job, session, storage: {"slow": slow(measured(), 0.8)})
    session, run = Session("a:1", False, "a", {}, tmp_path, "1"), RunDir(tmp_path / "run")

    def job(workers: int) -> Any:
        cluster = {"workers": workers, "resources": {"exclude": ["d"]}}
        return parse({"data": {"source": "x"}, "train": {"steps": 1, "global_batch": 8}, "cluster": cluster})

    with Starting() as starting:
        left = training._without_slow(job(2), session, run, starting)
        assert left.cluster.resources.exclude == ["d", "b", "c"]
        with pytest.raises(PreflightError, match="without the slow nodes b, c: the job asks for 3 workers"):
            training._without_slow(job(3), session, run, starting)
        assert training._without_slow(job(3), replace(session, private=True), run, starting) == job(3)
    told = capsys.readouterr().err
    assert "left out: node c: 300 TFLOP/s of a matrix product" in told
    assert "--exclude-slow: there are no other nodes" in told


def test_the_text_says_how_to_leave_them_out(capsys: Any) -> None:
    """The table has a row a node, and then the field to set."""
    show({"nodes": measured(), "differs": [], "slow": slow(measured(), 0.8)})
    out = capsys.readouterr().out
    assert "cluster.resources.exclude=[b, c]" in out
    assert "node b: 1 GB/s to other nodes, the median is 13" in out
