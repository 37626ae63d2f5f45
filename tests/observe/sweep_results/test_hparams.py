"""raydist.observe.sweep_results.hparams, read back with the backend of TensorBoard's HPARAMS tab."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, list_session_groups
from tensorboard.plugins.hparams.backend_context import Context

from raydist.observe.exporters import Facts as RunFacts
from raydist.observe.exporters.tensorboard import Exporter
from raydist.observe.sweep_results import Facts, Row
from raydist.observe.sweep_results.hparams import Rows
from raydist.run.sweep_directory import SweepDir

Make = Callable[..., Row]
ALL = [api_pb2.STATUS_UNKNOWN, api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE, api_pb2.STATUS_RUNNING]


def read(folder: SweepDir) -> EventMultiplexer:
    """The events as `tensorboard --logdir SWEEP` reads them."""
    events = EventMultiplexer()
    events.AddRunsFromDirectory(folder.uri)
    events.Reload()
    return events


def shown(folder: SweepDir) -> dict[str, Any]:
    """The rows of the HPARAMS tab: name -> its parameters, metrics, step, status and times."""
    events = read(folder)
    context = Context(TBContext(data_provider=MultiplexerDataProvider(events, folder.uri)))
    request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=100, allowed_statuses=ALL)
    answer = list_session_groups.Handler(RequestContext(), context, "", request).run()
    found = {}
    for group in answer.session_groups:
        (session,) = group.sessions
        found[group.name] = {
            "hparams": {name: getattr(value, str(value.WhichOneof("kind"))) for name, value in group.hparams.items()},
            "metrics": {one.name.tag: one.value for one in group.metric_values},
            "step": {one.training_step for one in group.metric_values},
            "status": api_pb2.Status.Name(session.status),
            "times": (session.start_time_secs, session.end_time_secs),
        }
    return found


def test_a_row_a_cell(folder: SweepDir, row: Make) -> None:
    """A row has the parameters with their types and the status; objective, losses, tokens and seconds; start and end."""
    rows = Rows(Facts(folder))
    rows.write(row("lr0.001-a"))
    rows.write(row("lr0.01-b", 0.01, "stopped", metric="loss"))
    rows.write(row("lr0.1-c", 0.1, "failed", cause="KeyError", figures={}))
    told = shown(folder)
    assert sorted(told) == ["lr0.001-a", "lr0.01-b", "lr0.1-c"]
    first = told["lr0.001-a"]
    assert first["hparams"] == {
        "optim.lr": 0.001,
        "optim.schedule": '{"name": "wsd"}',
        "train.compile": True,
        "parallel.strategy": "ddp",
        "status": "finished",
    }
    assert first["metrics"] == {"objective": 2.25, "eval_loss": 2.25, "loss": 2.5, "tokens": 5120.0, "seconds": 12.5}
    assert (first["step"], first["status"], first["times"]) == ({40}, "STATUS_SUCCESS", (100.0, 200.0))
    assert (told["lr0.01-b"]["hparams"]["status"], told["lr0.01-b"]["status"]) == ("stopped", "STATUS_UNKNOWN")
    assert told["lr0.01-b"]["metrics"]["objective"] == 2.5
    assert (told["lr0.1-c"]["metrics"], told["lr0.1-c"]["status"]) == ({"seconds": 12.5}, "STATUS_FAILURE")


def test_a_cell_is_listed_once(folder: SweepDir, row: Make) -> None:
    """A cell's curves, of two attempts, and its row are one run in TensorBoard, with all points."""
    run = folder.run("lr0.001-a")
    for step in (1, 2):
        curves = Exporter(RunFacts(run))
        curves.scalars(step, {"train/loss": 4.0 - step}, 150.0)
        curves.close()
    Rows(Facts(folder)).write(row("lr0.001-a"))
    Rows(Facts(folder)).write(row("lr0.01-b", figures={}))
    events = read(folder)
    assert sorted(events.Runs()) == ["runs/lr0.001-a/tensorboard", "runs/lr0.01-b/tensorboard"]
    losses = events.Tensors("runs/lr0.001-a/tensorboard", "train/loss")
    assert [point.step for point in losses] == [1, 2]
    assert shown(folder)["lr0.001-a"]["metrics"]["objective"] == 2.25
    assert sorted(run.storage.files("tensorboard"))[-1].endswith(".row"), "TensorBoard reads it last"


def test_written_again_it_is_the_same(folder: SweepDir, row: Make) -> None:
    """A driver that follows a killed one knows which rows exist; writing a row again changes nothing."""
    rows = Rows(Facts(folder))
    assert not rows.has("a")
    rows.write(row("a"))
    before = {name: folder.storage.read(name) for name in folder.storage.files(recursive=True)}
    assert Rows(Facts(folder)).has("a")
    assert not Rows(Facts(folder)).has("b")
    rows.write(row("a"))
    assert {name: folder.storage.read(name) for name in folder.storage.files(recursive=True)} == before
    assert len(before) == 1


def test_loads_neither_torch_nor_tensorflow(folder: SweepDir) -> None:
    """The driver imports neither torch, TensorFlow, pandas nor ray to write rows."""
    script = (
        "import sys; from raydist.observe.sweep_results import Facts, Row; from raydist.observe.sweep_results.hparams import Rows\n"
        "from raydist.run.sweep_directory import SweepDir\n"
        "Rows(Facts(SweepDir(sys.argv[1]))).write(Row('a', 0, 1, {'x': 1}, 'finished', None, 1.0, 2.0, 1.0, {'loss': 1.0}))\n"
        "print(sorted({n.partition('.')[0] for n in sys.modules} & {'torch', 'tensorflow', 'pandas', 'ray'}))"
    )
    told = subprocess.run([sys.executable, "-c", script, folder.uri], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"
    assert list(shown(folder)) == ["a"]
