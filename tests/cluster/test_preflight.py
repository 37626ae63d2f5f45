"""A job that the cluster cannot run is refused before a worker is reserved, with the request and the available resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raydist.cluster import node_facts, preflight
from raydist.cluster.node_facts import versions
from raydist.cluster.nodes import usable
from raydist.cluster.place import where
from raydist.cluster.preflight import check_resources, gpus_per_worker, look_around
from raydist.errors import PreflightError, SpecError, UsageError
from raydist.run.lease import SKEW_S
from raydist.spec import JobSpec, parse
from raydist.spec.resources import ResourcesSpec


def job(**cluster: Any) -> JobSpec:
    """A job with these fields in `cluster`, or `parallel`."""
    parallel = {name: cluster.pop(name) for name in ("tensor", "tensor_across_nodes") if name in cluster}
    return parse({"data": {"source": "x"}, "train": {"steps": 1}, "cluster": cluster, "parallel": parallel})


@pytest.mark.parametrize(
    ("cluster", "nodes", "expected"),
    [
        ({"workers": 2}, [{"CPU": 2.0}], None),
        ({"workers": 3}, [{"CPU": 2.0}], "3 workers of 1 CPU, the cluster has 1 node with 2 CPUs in all: 2 would fit"),
        (
            {"workers": 3},
            [{"CPU": 2.0}],
            "workers: 2, or let them share CPUs, cluster.cpus_per_worker: 0.6, or add nodes",
        ),
        ({"workers": 3, "cpus_per_worker": 0.6}, [{"CPU": 2.0}], None),
        ({"workers": 3, "resources": {"custom": {"disk": 1}}}, [{"CPU": 2.0, "disk": 9.0}], "workers: 2, or add nodes"),
        # 8 CPUs in total, but no node has room for two workers of 3.
        ({"workers": 3, "cpus_per_worker": 3}, [{"CPU": 4.0}, {"CPU": 4.0}], "2 nodes with 8 CPUs in all: 2 would fit"),
        ({"workers": 2, "cpus_per_worker": 0.5}, [{"CPU": 1.0}], None),
        ({"workers": 10, "cpus_per_worker": 0.1}, [{"CPU": 1.0}], None),
        (
            {"workers": 2, "gpus_per_worker": 1},
            [{"CPU": 8.0}],
            "2 workers of 1 CPU and 1 GPU, the cluster has 1 node with 8 CPUs",
        ),
        ({"workers": 4}, [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 2.0}], None),
        # Two CPUs are left over, on two nodes: no two ranks of a replica fit there.
        (
            {"workers": 6, "tensor": 2},
            [{"CPU": 3.0}, {"CPU": 3.0}],
            "6 workers of 1 CPU, each 2 on one node (parallel.tensor), the cluster",
        ),
        ({"workers": 4, "tensor": 2}, [{"CPU": 3.0}, {"CPU": 3.0}], None),
        ({"workers": 6, "tensor": 2, "tensor_across_nodes": True}, [{"CPU": 3.0}, {"CPU": 3.0}], None),
        ({"workers": 1, "cpus_per_worker": 64}, [{"CPU": 8.0}], "reduce the resources per worker"),
    ],
)
def test_resources(cluster: dict[str, Any], nodes: list[dict[str, float]], expected: str | None) -> None:
    """Each worker must fit on one node; the sum over nodes is not enough. The remedy names a number that would fit."""
    problems = check_resources(job(**cluster), nodes)
    assert len(problems) == (expected is not None)
    if expected:
        assert expected in problems[0]


def test_an_empty_address_is_not_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a variable which is not set; without an address it is RAY_ADDRESS's cluster, or this machine."""
    with pytest.raises(UsageError, match="address: is empty"):
        where("")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert (where(None), where("local")) == ("auto", "local")
    monkeypatch.delenv("RAY_ADDRESS")
    assert where(None) == "local"


@pytest.mark.parametrize(
    ("wanted", "gpus", "expected"), [("auto", 0, 0.0), ("auto", 1, 0.0), ("auto", 2, 1.0), (0, 8, 0.0), (0.5, 8, 0.5)]
)
def test_gpus_are_taken_where_there_are_enough(wanted: Any, gpus: float, expected: float) -> None:
    """`auto` is one GPU each if two workers can each get one, else none; a number is used as it is."""
    assert gpus_per_worker(job(workers=2, gpus_per_worker=wanted), {"CPU": 8.0, "GPU": gpus}) == expected


@pytest.mark.parametrize(
    ("sections", "gpus", "local", "told"),
    [
        ({"precision": {"params": "fp16"}}, 0, True, "precision: fp16 needs GPUs"),
        ({"precision": {"params": "fp16"}}, 1, True, "there are not enough GPUs here for one per worker"),
        ({"precision": {"params": "fp16"}}, 2, True, None),
        ({"precision": {"params": "fp16"}}, None, True, None),  # AMD GPUs: unknown before Ray counts them
        ({"precision": {"params": "fp16"}}, 0, False, None),  # the cluster may have some
        (
            {"precision": {"params": "fp16"}, "cluster": {"gpus_per_worker": 0}},
            8,
            False,
            "cluster.gpus_per_worker is 0",
        ),
        ({"precision": {"params": "bf16"}}, 0, True, None),
        ({"cluster": {"gpus_per_worker": 1}}, 0, True, "cluster.gpus_per_worker: 1, but this machine has no GPU"),
        ({"cluster": {"gpus_per_worker": 1}}, 0, False, None),
        ({"cluster": {"gpus_per_worker": 1}}, 1, True, None),
        ({}, 0, True, None),
    ],
)
def test_what_can_be_told_before_ray_starts(
    sections: dict[str, Any], gpus: int | None, local: bool, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp16 without a GPU for the workers, and missing GPUs, are refused; if only the cluster can tell, there is no error."""
    monkeypatch.setattr(preflight, "host_gpus", lambda: gpus)
    both = {"workers": 2, **sections.get("cluster", {})}
    spec = parse({"data": {"source": "x"}, "train": {"steps": 1}, **sections, "cluster": both})
    if told is None:
        preflight.check_early(spec, local=local)
        return
    with pytest.raises(PreflightError) as caught:
        preflight.check_early(spec, local=local)
    assert told in caught.value.message
    assert "\n" not in caught.value.message


def test_no_gpus_where_none_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA_VISIBLE_DEVICES is empty: there are no GPUs, as in Ray's count, whatever the driver reports."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert preflight.host_gpus() == 0


def test_a_node_says_all_that_it_lacks(tmp_path: Path) -> None:
    """Storage that cannot be written, a missing dataset, missing folders and a missing module are reported together."""
    (tmp_path / "file").write_text("in the way")
    found = look_around(
        str(tmp_path / "file" / "run"), str(tmp_path / "no-data"), ["no_such_module"], str(tmp_path / "no-swap"),
        weights=str(tmp_path / "no-model"),
    )  # fmt: skip
    text = "\n".join(found["problems"])
    assert "every node can write to" in text
    assert "no-data was not found" in text
    assert "offload.path" in text
    assert "no-swap does not exist" in text
    assert "the weights " in text
    assert "no-model were not found" in text
    assert "no module 'no_such_module'" in text
    assert found["versions"] == versions()


def test_a_compiled_model_needs_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without one is named before a rank starts; a job that compiles nothing needs none."""
    for variable in ("CC", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))

    def problems(compiles: bool | str) -> list[str]:
        return list(look_around(str(tmp_path / "run"), None, [], compiles=compiles)["problems"])

    assert problems(False) == []
    (problem,) = problems("blocks")
    assert problem.startswith("train.compile: blocks needs a C++ compiler, and there is none")
    (tmp_path / "clang").touch(mode=0o755)
    assert problems(True) == []


def test_a_node_with_a_folder_of_its_own(tmp_path: Path) -> None:
    """Its storage can be written, but is not the driver's: one problem, and nothing is written there."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "index.json").write_text("{}")
    (tmp_path / "run").mkdir()
    (problem,) = look_around(str(tmp_path / "run"), str(tmp_path / "data"), [], mark=".shared-1")["problems"]
    assert "is another folder there" in problem
    assert list((tmp_path / "run").iterdir()) == []
    (tmp_path / "run" / ".shared-1").touch()
    assert look_around(str(tmp_path / "run"), str(tmp_path / "data"), [], mark=".shared-1")["problems"] == []


def test_a_good_node_has_nothing_to_say(tmp_path: Path) -> None:
    """There are no problems, the check leaves no files, and it returns a version of everything that must agree between nodes."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "index.json").write_text("{}")
    found = look_around(str(tmp_path / "run"), str(tmp_path / "data"), ["json"])
    assert found["problems"] == []
    assert list((tmp_path / "run").iterdir()) == []
    assert all(versions().values())


FACTS = {"cpus": 64, "gpus": 8, "gpu": "NVIDIA H100 80GB HBM3", "driver": "570.1", "nccl": "2.27.3", "memory_gib": 1000.0,
         "shm_gib": 500.0, "disk_gib": 900.0, "network_gbit": 100.0, "storage_mb_s": 900.0, "storage_iops": 300.0}  # fmt: skip


def test_a_node_is_held_against_the_resources() -> None:
    """Each field of `cluster.resources` that a node does not reach is named with both values; what the node has enough of, and what
    cannot be known, is not."""
    every = {"cpus": 64, "gpus": 8, "gpu": "h100", "memory_gib": 900, "shm_gib": 400, "disk_gib": 500, "network_gbit": 100,
             "storage_mb_s": 800, "storage_iops": 200}  # fmt: skip
    assert node_facts.lacks(ResourcesSpec(**every), FACTS) == []
    assert node_facts.lacks(ResourcesSpec(network_gbit=400), FACTS | {"network_gbit": None}) == []
    small = {name: value / 3 if isinstance(value, float | int) else value for name, value in FACTS.items()}
    found = node_facts.lacks(ResourcesSpec(**every), small | {"gpu": "NVIDIA A100-SXM4-80GB"})
    assert [line.split(":")[0].removeprefix("cluster.resources.") for line in found] == [
        "gpu",
        *(n for n in every if n != "gpu"),
    ]
    assert found[0] == "cluster.resources.gpu: h100, but it has NVIDIA A100-SXM4-80GB"
    assert "cluster.resources.network_gbit: 100, but it has 33.33 Gbit/s" in found
    assert node_facts.lacks(ResourcesSpec(gpu="H100"), FACTS | {"gpus": 0, "gpu": ""})[0].endswith("it has no GPU")


def test_the_node_that_differs_is_named() -> None:
    """Of the nodes with GPUs, the one with another driver or NCCL; a head without GPUs does not count."""
    cluster = {f"10.0.0.{i}": FACTS for i in range(3)} | {"10.0.0.9": FACTS | {"gpus": 0, "gpu": "", "nccl": ""}}
    assert node_facts.odd(cluster) == []
    cluster["10.0.0.2"] = FACTS | {"nccl": "2.21.5"}
    assert node_facts.odd(cluster) == ["node 10.0.0.2: NCCL is 2.21.5, that of 2 of 3 nodes is 2.27.3"]


HERE = {
    "python": "3.11",
    "raydist": "0.1.0",
    "torch": "2.13.0",
    "ray": "2.60.0",
    "pyarrow": "26.0.1",
    "raydist's files": "ab",
}


@pytest.mark.parametrize(
    ("there", "clock", "told"),
    [
        ({}, 100.0, []),
        ({}, 90.0 - SKEW_S, []),  # the answer took from 90 to 110: a clock at 110 + SKEW_S may be right
        ({}, 110.0 + SKEW_S, []),
        ({}, 125.0, ["its clock is 15 s ahead of the driver's; a run's lease allows 5 s: synchronise"]),
        ({}, 60.0, ["its clock is 30 s behind the driver's"]),
        ({"raydist": "0.2.0", "raydist's files": "cd"}, 100.0, ["raydist is 0.2.0, the driver's is 0.1.0; install the same"]),
        ({"raydist's files": "cd"}, 100.0, ["its raydist 0.1.0 has other files than the driver's"]),
        ({"torch": None, "python": "3.12"}, 100.0, ["python is 3.12, the driver's is 3.11", "torch is missing"]),
    ],
)  # fmt: skip
def test_a_node_differs_from_the_driver(there: dict[str, str | None], clock: float, told: list[str]) -> None:
    """One line for each version, one for a raydist of the same version with other files, and one for a clock that is certainly off
    by more than the lease allows."""
    found = node_facts.differs({**HERE, **there}, HERE, clock, asked_at=90.0, told_at=110.0)
    assert len(found) == len(told)
    assert all(line.startswith(text) for line, text in zip(found, told, strict=True))


def test_other_files_are_another_raydist(tmp_path: Path) -> None:
    """A changed byte, and a file under another name; compiled files do not count."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/a.py").write_text("x = 1")
    (tmp_path / "sub/a.pyc").write_bytes(b"1")
    first = node_facts.source_hash(tmp_path)
    (tmp_path / "sub/a.pyc").write_bytes(b"2")
    assert node_facts.source_hash(tmp_path) == first
    (tmp_path / "sub/a.py").rename(tmp_path / "sub/b.py")
    renamed = node_facts.source_hash(tmp_path)
    (tmp_path / "sub/b.py").write_text("x = 2")
    assert len({first, renamed, node_facts.source_hash(tmp_path)}) == 3


def test_what_does_not_stop_a_run_is_noted() -> None:
    """A node with another GPU model or driver, and an expected speed of an interface that does not say its own."""
    cluster = {f"10.0.0.{i}": FACTS for i in range(3)}
    fast = ResourcesSpec(network_gbit=100)
    assert node_facts.notes(fast, cluster) == []
    cluster |= {"10.0.0.2": FACTS | {"gpu": "NVIDIA A100-SXM4-80GB", "network_gbit": None}}
    model, network = node_facts.notes(fast, cluster)
    assert model.startswith("node 10.0.0.2: GPU model is NVIDIA A100-SXM4-80GB, that of 2 of 3 nodes is NVIDIA H100")
    assert network.startswith("cluster.resources.network_gbit: 100 was not checked on 10.0.0.2: ")
    assert node_facts.notes(ResourcesSpec(), cluster) == [model]
    many = {f"10.0.1.{i}": FACTS | {"network_gbit": None} for i in range(5)}
    (line,) = node_facts.notes(fast, many)
    assert "on 10.0.1.0, 10.0.1.1, 10.0.1.2 and 2 more: " in line


def test_labels_and_addresses_choose_the_nodes() -> None:
    """A node without the label, or left out by its address, is not used. A label that no node has is an error with the labels that
    there are."""
    nodes: list[dict[str, Any]] = [
        {"NodeManagerAddress": f"10.0.0.{i}", "Labels": {"pool": "a" if i < 2 else "b"}, "Resources": {"CPU": 8.0}}
        for i in range(3)
    ]
    asked = ResourcesSpec(labels={"pool": "a"}, exclude=["10.0.0.0"])
    assert [n["NodeManagerAddress"] for n in nodes if usable(n, asked)] == ["10.0.0.1"]
    assert preflight.check_labels(job(resources={"labels": {"pool": "a"}}), nodes) == []
    (problem,) = preflight.check_labels(job(resources={"labels": {"pool": "h100"}}), nodes)
    assert "pool=h100: no node has it; the nodes have pool=a (2), pool=b (1)" in problem


def test_custom_resources_are_held_against_the_nodes() -> None:
    """Each worker takes its amount of its node's; one that no node has is an error with the command that starts such a node."""
    asks = job(workers=3, cpus_per_worker=1, resources={"custom": {"fast_nvme": 1}})
    nodes = [{"CPU": 8.0, "fast_nvme": 2.0}, {"CPU": 8.0}]
    (problem,) = check_resources(asks, nodes)
    assert "3 workers of 1 CPU and 1 fast_nvme, the cluster has 2 nodes with 16 CPUs and 2 fast_nvme in all" in problem
    assert "2 would fit" in problem
    assert check_resources(asks, [*nodes, {"CPU": 1.0, "fast_nvme": 1.0}]) == []
    (problem,) = preflight.check_labels(asks, [{"Resources": {"CPU": 8.0, "node:10.0.0.1": 1.0}}])
    assert "custom: fast_nvme: no node has it" in problem
    assert """`ray start --resources '{"fast_nvme": 1}'`""" in problem
    for bad in ({"GPU": 1}, {"node:10.0.0.1": 1}, {"a b": 1}, {"nvme": 1.5}, {"nvme": 0}):
        with pytest.raises(SpecError, match=r"cluster\.resources\.custom"):
            job(resources={"custom": bad})


def test_the_storage_is_measured_if_asked(tmp_path: Path) -> None:
    """MB/s and files a second, and no file is left."""
    run, data = tmp_path / "run", tmp_path / "data"
    run.mkdir()
    data.mkdir()
    (data / "index.json").write_text("{}")
    assert "storage_mb_s" not in look_around(str(run), str(data), [])["has"]
    found = look_around(str(run), str(data), [], address="127.0.0.1", measure=True)
    assert found["problems"] == []
    assert found["has"]["storage_mb_s"] > 0 < found["has"]["storage_iops"]
    assert list(run.iterdir()) == []
