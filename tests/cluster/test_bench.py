"""`raydist bench comm` on a real private Ray: all its measurements, how it ends, and that no process remains.

Over a minute: one command measures all that it can, on a Ray of its own.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.train

from raydist.cluster import bench
from raydist.cluster.session import Session, open_session, worker_environment
from raydist.errors import PreflightError, WorkerFailed
from raydist.spec import JobSpec
from tests import forked

ROOT = Path(__file__).parents[2]
JOB = """\
model: {layers: 2, width: 64, heads: 2, context: 16}
data: {source: none}
train: {steps: 1, global_batch: 4, micro_batch: 2}
cluster: {workers: 2, cpus_per_worker: 0.5}
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """A private Ray whose workers can import this file."""
    path = [str(Path(__file__).parent), str(ROOT)]
    with open_session(
        "local", env=worker_environment(), log_dir=tmp_path_factory.mktemp("logs"), python_path=path
    ) as opened:
        yield opened


def job(workers: int = 2, cpus: float = 0.5) -> JobSpec:
    """A job with this number of ranks."""
    train = {"steps": 1, "global_batch": workers, "micro_batch": 1}
    cluster = {"workers": workers, "cpus_per_worker": cpus}
    return JobSpec.model_validate({"data": {"source": "none"}, "train": train, "cluster": cluster})


def interrupt(config: dict[str, Any]) -> None:
    """A rank that never ends; it interrupts the driver as a user would."""
    os.kill(config["driver"], signal.SIGINT)
    signal.pause()


def fail(config: dict[str, Any]) -> None:
    """One rank fails, the others return: of two that fail at once, Ray may report either one first."""
    if ray.train.get_context().get_world_rank() == 1:
        raise ValueError(f"no such link, with {config['gpus']:g} GPUs")


def test_ctrl_c_ends_it(session: Session) -> None:
    """Ctrl-C ends the ranks and is reported; the signal handlers are restored."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as caught:
        bench.run("test_bench:interrupt", {"driver": os.getpid()}, job(), session, spread=False)
    assert caught.value.code == 130
    assert signal.getsignal(signal.SIGINT) is before


def test_a_failure_is_told(session: Session) -> None:
    """The error has the rank, its exception and its traceback; a job that does not fit is refused."""
    with pytest.raises(WorkerFailed, match="rank 1: ValueError: no such link, with 0 GPUs") as caught:
        bench.run("test_bench:fail", {}, job(), session, spread=True)
    assert "in fail" in caught.value.hint
    with pytest.raises(PreflightError, match="999"):
        bench.run("test_bench:fail", {}, job(999), session, spread=False)
    assert bench.workers(session) == max(2, int(session.resources.get("GPU", 0)))


def test_the_command(tmp_path: Path) -> None:
    """A job's links, gradients and buckets as one object on stdout; all received numbers are correct."""
    (tmp_path / "job.yaml").write_text(JOB)
    sizes = ["--max-bytes", "64KiB", "--min-bytes", "16KiB", "--iters", "3"]
    asked = ["bench", "comm", "job.yaml", *sizes, "--set", "comm={compress: auto, topology: auto}", "--json"]
    done = forked.run(["raydist", *asked], os.environ, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["v"], told["world_size"], told["backend"]) == (1, 2, "gloo")
    assert [(r["op"], r["size"]) for r in told["collectives"][:3]] == [
        ("all_reduce", 16384), ("all_reduce", 65536), ("all_gather", 16384),
    ]  # fmt: skip
    assert len(told["collectives"]) == 12
    assert all(r["wrong"] == 0 and r["iterations"] == 3 for r in told["collectives"])
    assert told["pairs"]["names"] == ["rank 0", "rank 1"]
    assert told["pairs"]["bandwidth"][0][1] > 0
    parameters = 257 * 64 + 2 * (4 * 64**2 + 2 * 64) + 64
    assert told["gradients"]["bytes"] > 4 * parameters
    assert set(told["gradients"]["predicted"]) == {"ring", "tree", "halving_doubling", "torus_2d"}
    assert told["gradients"]["measured"] > 0
    assert told["bucket"]["bucket_mb"] is None  # a quarter of a MiB: too small for several buckets
    assert told["bucket"]["because"].startswith("torch's")
    assert told["nccl"] is None
