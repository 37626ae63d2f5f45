"""raydist.observe.exporters.wandb in offline mode: what is in the files that `wandb sync` sends."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from raydist.errors import UserError
from raydist.observe.exporters import Facts
from raydist.observe.exporters.wandb import Exporter
from raydist.run.directory import RunDir

if TYPE_CHECKING:  # each process of the tests collects this file, and one runs it
    from wandb.proto.wandb_internal_pb2 import Record

Rows = Callable[..., list[dict[str, Any]]]
SPEC = {"model": {"name": "gpt", "layers": 4, "hidden": None}, "train": {"steps": 20}}
_MAGIC, _BLOCK, _HEAD = 7, 1 << 15, struct.Struct("<4xHB")
"""wandb's files: LevelDB's log format after 7 bytes. A record's chunks have a checksum, a length and a type: 1 whole, 2 first, 3
middle, 4 last."""


@pytest.fixture(autouse=True, scope="module")
def _core() -> Iterator[None]:
    """The process that wandb starts ends with these tests."""
    import wandb

    yield
    wandb.teardown()


def made(run: RunDir, notes: list[str] | None = None, **options: Any) -> Exporter:
    note = (notes if notes is not None else []).append
    return Exporter(Facts(run, Exporter.resolve({"mode": "offline", **options}, run), SPEC, note))


def records(data: bytes) -> Iterator[Record]:
    from wandb.proto.wandb_internal_pb2 import Record

    at, whole = _MAGIC, b""
    while at + _HEAD.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _HEAD.size:
            at += left
            continue
        length, kind = _HEAD.unpack_from(data, at)
        whole += data[at + _HEAD.size : at + _HEAD.size + length]
        at += _HEAD.size + length
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""


def files(run: RunDir) -> list[list[Record]]:
    """The records of each driver's file, in the order of their starts. wandb-core may answer before it has written the last one."""
    assert run.storage.local is not None
    found: list[list[Record]] = [[]]
    until = time.monotonic() + 240
    while not all(any(r.HasField("exit") for r in of) for of in found):
        assert time.monotonic() < until, "wandb-core has not written the end of a run"
        time.sleep(0.05)
        found = [[*records(path.read_bytes())] for path in (run.storage.local / "wandb").glob("offline-run-*/*.wandb")]
    return sorted(found, key=lambda of: min(r.run.start_time.ToNanoseconds() for r in of if r.HasField("run")))


def history(of: list[Record], column: str) -> list[tuple[int, float]]:
    """(step, value) of each row that has this column."""
    rows = [
        {"".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}
        for r in of
        if r.HasField("history")
    ]
    return [(row["step"], row[column]) for row in rows if column in row]  # fmt: skip


def summary(of: list[Record]) -> dict[str, Any]:
    return {"".join(u.nested_key) or u.key: json.loads(u.value_json) for r in of for u in r.summary.update}


def test_a_run_and_its_resumption_are_one(run: RunDir, rows: Rows) -> None:
    """Two drivers write to one W&B run: the job as config, curves over `step`, the newest attempt and failure, how each ended. A
    step that was trained again, and one without a finite loss, are there, too."""
    notes: list[str] = []
    first = made(run, notes, project="ours", tags=["blue"], group="g")
    first.attempt(1, 0, 1.0)
    first.steps(rows(range(1, 3)), 1.0)
    first.event({"kind": "eval", "at": 2.0, "step": 2, "loss": 0.25})
    first.event({"kind": "failure", "at": 3.0, "cause": "WorkerDied: process 7"})
    first.event({"kind": "ended", "at": 4.0, "status": "stopped"})
    first.close()
    second = made(run, notes, project="ours")
    second.attempt(2, 1, 5.0)
    second.steps(
        [{**row, "loss": float("inf") if row["step"] == 3 else row["loss"]} for row in rows(range(2, 503), 2)], 5.0
    )
    second.event({"kind": "ended", "at": 9.0, "status": "finished"})
    second.close()
    earlier, later = files(run)
    begun = [next(r.run for r in of if r.HasField("run")) for of in (earlier, later)]
    known = json.loads(run.storage.read("wandb.json"))
    assert known == {"entity": None, "project": "ours", "id": begun[0].run_id}
    assert {(one.run_id, one.project, one.display_name) for one in begun} == {(known["id"], "ours", run.name)}
    assert ([*begun[0].tags], begun[0].run_group) == (["blue"], "g")
    config = {one.key: json.loads(one.value_json) for one in begun[0].config.update}
    assert {key: value for key, value in config.items() if key != "_wandb"} == {
        "model.name": "gpt", "model.layers": 4, "train.steps": 20,
    }, "what is not set is not in it"  # fmt: skip
    axes = {r.metric.glob_name: r.metric.step_metric for r in earlier if r.HasField("metric")}
    assert axes == {"train/*": "step", "eval/*": "step"}
    assert history(earlier, "train/loss") == [(1, 1.0), (2, 0.5)]
    assert history(earlier, "train/tokens_per_second") == [(1, 1000.0), (2, 1000.0)]
    assert history(earlier, "eval/loss") == [(2, 0.25)]
    assert [step for step, _ in history(later, "train/lr")] == [*range(2, 503)]
    assert dict(history(later, "train/loss"))[3] == float("inf")
    assert {key: value for key, value in summary(earlier).items() if key.startswith("raydist")} == {
        "raydist.attempt": 1, "raydist.resume_step": 0, "raydist.failure": "WorkerDied: process 7",
    }  # fmt: skip
    assert [r.exit.exit_code for of in (earlier, later) for r in of if r.HasField("exit")] == [1, 0]
    assert [note.partition(": wandb sync /")[0] for note in notes] == [f"wandb: run {known['id']}"] * 2


def test_nothing_of_this_host_is_sent(run: RunDir) -> None:
    """Neither installed packages, code and command line, nor readings of the machine; another project begins another W&B run."""
    made(run).close()
    made(run, project="other").close()
    assert [
        r.WhichOneof("record_type") for of in files(run) for r in of if r.HasField("files") or r.HasField("stats")
    ] == []
    assert run.storage.local is not None
    assert [*(run.storage.local / "wandb").glob("offline-run-*/files/*")] == []
    ids = [next(r.run.run_id for r in of if r.HasField("run")) for of in files(run)]
    assert ids[0] != ids[1] == json.loads(run.storage.read("wandb.json"))["id"]


def test_what_the_driver_s_environment_decides(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mode and server, unless options name them; a run on an object store without a folder for wandb's files is an error before
    it starts."""
    for name in ("WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    found = Exporter.resolve({}, run)
    assert (found["mode"], found["url"], found["project"], found["dir"]) == ("online", None, "raydist", run.uri)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_BASE_URL", "http://h:8080")
    found = Exporter.resolve({}, run)
    assert (found["mode"], found["url"]) == ("offline", "http://h:8080")
    assert Exporter.resolve({"mode": "online"}, run)["mode"] == "online"
    away = RunDir("s3://key:secret@bucket/a-run?endpoint_override=127.0.0.1:9&scheme=http&region=us-east-1")
    with pytest.raises(UserError, match="cannot keep its files on s3://") as caught:
        Exporter.resolve({}, away)
    assert "dir" in caught.value.hint
    assert Exporter.resolve({"dir": "/logs"}, away)["dir"] == "/logs"
