"""raydist.observe.exporters.tensorboard, read back with TensorBoard's own reader."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from raydist.errors import StorageError
from raydist.observe.exporters import Facts
from raydist.observe.exporters.tensorboard import Exporter
from raydist.run.directory import TENSORBOARD, RunDir

Rows = Callable[..., list[dict[str, Any]]]


def curve(run: RunDir, tag: str) -> list[tuple[int, float]]:
    """The points that TensorBoard shows: (step, value)."""
    read = EventAccumulator(run.storage.path(TENSORBOARD), size_guidance={"scalars": 0})
    read.Reload()
    return [(point.step, point.value) for point in read.Scalars(tag)]


def test_curves(run: RunDir, rows: Rows) -> None:
    """Each field with a curve has its points at their steps, and so has the eval loss."""
    mailbox = Exporter(Facts(run))
    mailbox.attempt(1, 0, 1.0)
    known = {1: None, 2: None, 3: 41.5}
    mailbox.steps([{**row, "grad_noise_scale": known[row["step"]]} for row in rows(range(1, 4))], 2.0)
    mailbox.event({"kind": "eval", "at": 2.5, "step": 2, "loss": 0.25, "tokens": 9, "best": True})
    mailbox.close()
    assert curve(run, "train/loss") == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert curve(run, "train/tokens_per_second") == [(s, pytest.approx(1000.0)) for s in (1, 2, 3)]
    assert curve(run, "train/samples_per_second") == [(s, pytest.approx(80.0)) for s in (1, 2, 3)]
    assert curve(run, "eval/loss") == [(2, 0.25)]
    assert curve(run, "train/grad_noise_scale") == [(3, 41.5)]
    for tag in ("lr", "grad_norm", "seconds", "data_seconds"):
        assert len(curve(run, f"train/{tag}")) == 3


@pytest.mark.parametrize("same_driver", [True, False])
def test_steps_trained_again_replace_the_old(run: RunDir, rows: Rows, same_driver: bool) -> None:
    """After each restart a step has one point, with one driver or with a new driver within the same second."""
    mailbox = Exporter(Facts(run))
    for attempt, (resume, end) in enumerate([(0, 10), (6, 8), (3, 12)], start=1):
        mailbox.attempt(attempt, resume, 1.0)
        mailbox.steps(rows(range(resume + 1, end + 1), attempt), 1.0)
        mailbox.flush()
        if not same_driver:
            mailbox = Exporter(Facts(run))
    mailbox.close()
    assert [step for step, _ in curve(run, "train/loss")] == list(range(1, 13))


@pytest.mark.parametrize("local", [True, False])
def test_files_stay_small_and_whole(run: RunDir, rows: Rows, local: bool) -> None:
    """A long run is split into files of about 1 MiB, whenever it is flushed, on a local disk and on an object store."""
    Path(run.storage.path(TENSORBOARD)).mkdir(parents=True)
    if not local:
        run.storage.local = None
    mailbox = Exporter(Facts(run))
    for start in range(1, 12_001, 1_500):
        mailbox.steps(rows(range(start, start + 1_500)), 1.0)
        mailbox.flush(now=True)
        mailbox.flush()
        assert mailbox._buffer.tell() == 0 or not local  # what a local file has is not kept
    mailbox.close()
    sizes = [size for name, size in run.storage.files(TENSORBOARD).items()]
    assert len(sizes) > 1
    assert max(sizes) < 1.1 * 2**20
    assert [step for step, _ in curve(run, "train/loss")] == list(range(1, 12_001))


def test_histograms(run: RunDir) -> None:
    """Edges, counts and sums come back unchanged, under the parameter's name; a histogram without counts is left out."""
    mailbox = Exporter(Facts(run))
    shown = {"edges": [-2.0, -1.0, 1.0, 1.5], "counts": [3, 0, 5], "sum": 1.25, "sum_squares": 20.0}
    empty: dict[str, Any] = {"edges": [], "counts": [], "sum": 0.0, "sum_squares": 0.0}
    mailbox.event(
        {"kind": "histograms", "at": 3.0, "step": 7, "weights": {"head.weight": shown}, "gradients": {"x": empty}}
    )
    mailbox.close()
    read = EventAccumulator(run.storage.path(TENSORBOARD))
    read.Reload()
    assert read.Tags()["histograms"] == ["weights/head.weight"]
    (point,) = read.Histograms("weights/head.weight")
    value = point.histogram_value
    assert (point.step, value.min, value.max, value.num, value.sum, value.sum_squares) == (
        7,
        -2.0,
        1.5,
        8.0,
        1.25,
        20.0,
    )
    assert (value.bucket_limit, value.bucket) == ([-1.0, 1.0, 1.5], [3.0, 0.0, 5.0])


def test_what_storage_refused_is_written_later(run: RunDir, rows: Rows) -> None:
    """flush raises StorageError while the folder cannot be created; afterwards each step is written once."""
    obstacle = Path(run.storage.path(TENSORBOARD))
    mailbox = Exporter(Facts(run))
    obstacle.write_text("a file where the folder should be")
    mailbox.steps(rows(range(1, 3)), 1.0)
    with pytest.raises(StorageError):
        mailbox.flush()
    obstacle.unlink()
    mailbox.steps(rows(range(3, 5)), 1.0)
    mailbox.flush()
    assert [step for step, _ in curve(run, "train/loss")] == [1, 2, 3, 4]


def test_loads_neither_torch_nor_tensorflow(run: RunDir) -> None:
    """The monitor process imports neither torch, TensorFlow, pandas, ray nor boto3 when it writes curves."""
    script = (
        "import sys; from raydist.observe.run_monitor import RunMonitor; m = RunMonitor(sys.argv[1], interval_s=60.0);"
        "m.begin_attempt(1, 1, 0); m.push([dict(step=1, loss=1.0, lr=1.0, grad_norm=1.0, tokens=1, seconds=1.0,"
        " data_seconds=0.0, world_size=1, attempt=1, samples_hash='0')], []); m.end('finished');"
        "print(sorted({n.partition('.')[0] for n in sys.modules} & {'torch', 'tensorflow', 'pandas', 'ray', 'boto3'}))"
    )
    told = subprocess.run([sys.executable, "-c", script, run.uri], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
    assert run.storage.files(TENSORBOARD)
