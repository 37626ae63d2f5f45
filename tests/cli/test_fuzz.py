"""Damaged and hostile files: every command that reads them ends with exit code 0, 2 or 3, without a traceback, and prints no
control character of theirs.

hypothesis changes one file of a run, a sweep, a dataset or a job at a time: values of other types, missing keys, huge numbers, deep
nesting, control characters, cut bytes. RAYDIST_FUZZ=N makes N examples of each kind of file (`make fuzz`); else there are a few,
always the same ones.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xxhash
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raydist.checkpoint.manifest import canonical
from raydist.cli.main import main
from raydist.data import prepare
from raydist.data.index import INDEX, TOKENIZER, block_hashes
from raydist.faults import note
from raydist.launch import standalone
from raydist.run.directory import RunDir
from raydist.run.sweep_directory import SweepDir
from raydist.run.telemetry_log import TelemetryLog
from raydist.spec.sweep import load_sweep
from tests.report import story
from tests.report.sweep.conftest import Swept, train

DEADLINE_S, ASLEEP_S = 10, 120
"""For a command that hangs: of processor time, and of a wait for something that never comes."""
EXAMPLES = int(os.environ.get("RAYDIST_FUZZ", "0"))
MARK = "\x1b]0;title\x07\x1b[31m\x9b31m\u202e\r"
CONTROL = set("\x1b\x07\x9b\u202e\r\x00")

JOB: dict[str, Any] = {
    "name": "job",
    "data": {"path": "data"},
    "model": {"layers": 1, "width": 16, "heads": 2, "context": 16},
    "train": {"steps": 4, "global_batch": 2, "micro_batch": 2},
    "checkpoint": {"every": 2},
    "eval": {"every": 2, "batches": 1},
    "observe": {"exporters": ["jsonl"]},
}
SWEEP = {"name": "sweep", "base": "job.yaml", "array": {"parameters": {"lr": [1e-3, 1e-2]}}}
DEEPSPEED = {
    "train_batch_size": 4,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}},
    "bf16": {"enabled": "auto"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A user's folder: a job, a sweep, a dataset, a run with two checkpoints, and the folder of a started sweep."""
    root = tmp_path_factory.mktemp("fuzz")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("RAYDIST_STORAGE", str(root / "runs"))
        patch.setenv("RAYDIST_CACHE", str(root / "cache"))
        patch.setenv("COLUMNS", "200")
        (root / "text.jsonl").write_text("".join(json.dumps({"text": f"line {i}"}) + "\n" for i in range(100)))
        (root / "job.yaml").write_text(yaml.safe_dump(JOB))
        (root / "sweep.yaml").write_text(yaml.safe_dump(SWEEP))
        (root / "ds.json").write_text(json.dumps(DEEPSPEED))
        prepare.prepare(["text.jsonl"], "data", eval_fraction=0.5)
        with contextlib.redirect_stderr(io.StringIO()) as told:
            assert standalone.main(["job.yaml", "--name", "run", "--json"]) == 0, told.getvalue()
        run = RunDir("runs/run")
        with run.storage.appendable("events.jsonl").open("ab") as file:
            for event in story.events():
                file.write(json.dumps(event.to_dict()).encode() + b"\n")
        fault = {
            "fault": "kill",
            "rank": 1,
            "step": 3,
            "attempt": 1,
            "at": 4.0,
            "by": "rank",
            "asked": {},
            "node_ip": "h",
        }
        run.storage.write(note("00000003-kill-0-1", rank=1, time=1), json.dumps(fault).encode())
        samples = TelemetryLog(run)
        samples.add(story.readings())
        samples.flush()
        sweep = load_sweep("sweep.yaml")
        swept = Swept(SweepDir("runs/sweep"), sweep)
        course = {"loss": [[2, 1.0, 2.0, 3.0], [4, 2.0, 4.0, 2.5]], "eval_loss": [[4, 2.0, 4.0, 2.5]]}
        swept.finish(0, 2.5, course=course)
        swept.end(0, "exploited", source=swept.cells[1].id, step=2, tokens=8, changes={"optim.lr": [1e-3, 1e-2]})
        train(swept.folder.run(swept.cells[1].id), swept.cells[1], [3.0, 2.0], 2.0)
        swept.start(1)
        (root / "original").mkdir()
        for name in ("data", "runs", "job.yaml", "sweep.yaml", "ds.json"):
            copy = shutil.copytree if (root / name).is_dir() else shutil.copy
            copy(root / name, root / "original" / name)
        yield root


# --- changes of plain data

HUGE = st.sampled_from([10**30, -(10**30), 1 << 63, 1e308, float("nan"), float("inf"), -1, 0])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), HUGE, st.just(MARK), st.just("x" * 5000), st.text(max_size=20),
    st.just([]), st.just({}), st.just([[1, [2]]]), st.just({"a": {"b": MARK}}), st.just({MARK: 1}),
)  # fmt: skip


def deep(levels: int) -> Any:
    made: Any = 1
    for _ in range(levels):
        made = [made]
    return made


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values in plain data."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, one in inside for place in places(one, (*at, key)))]


def changed(value: Any, draw: Callable[[Any], Any]) -> Any:
    """Plain data with one change: another value somewhere, a key that is missing, or one more."""
    value = json.loads(json.dumps(value))
    *way, last = draw(st.sampled_from([p for p in places(value) if p] or [("",)]))
    at = value
    for key in way:
        at = at[key]
    what = draw(st.sampled_from(["replace", "replace", "replace", "delete", "deep", "add"]))
    if what == "delete":
        del at[last]
    elif what == "deep":
        at[last] = deep(draw(st.sampled_from([50, 150, 900])))
    elif what == "add" and isinstance(at, dict):
        at[draw(st.sampled_from([MARK, "zzz", "v"]))] = draw(LEAVES)
    else:
        at[last] = draw(LEAVES)
    return value


def cut(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    """Bytes that are truncated, flipped, repeated or replaced."""
    at = draw(st.integers(0, max(len(data) - 1, 0)))
    return {
        "cut": data[:at],
        "flip": data[:at] + bytes([draw(st.integers(0, 255))]) + data[at + 1 :],
        "nest": b"[" * 100_000,
        "digits": b"9" * 5000,
        "quoted": b'{"a": ' + b"9" * 5000 + b"}\n",
        "mark": data[:at] + MARK.encode() + data[at:],
        "empty": b"",
        "latin": b"\xff\xfe\x00",
    }[draw(st.sampled_from(["cut", "flip", "nest", "digits", "quoted", "mark", "empty", "latin"]))]


def of_json(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    return json.dumps(changed(json.loads(data), draw)).encode()


def of_manifest(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    """With a hash that is right again: whoever changes a manifest may write the hash, too."""
    body = changed(json.loads(data), draw)
    if not isinstance(body, dict):
        return canonical(body)
    body.pop("xxh3", None)
    with contextlib.suppress(ValueError, UnicodeEncodeError):
        return canonical({**body, "xxh3": xxhash.xxh3_128_hexdigest(canonical(body))})
    return b"{}"


def of_index(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    """With its own hash right again."""
    return sealed(changed(json.loads(data), draw))


def sealed(index: Any) -> bytes:
    """The index.json of these values, with its hash and its fingerprint."""
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        hashes = [[shard["hash"] for shard in index[split]["shards"]] for split in ("train", "eval")]
        token = index["tokenizer"]
        facts = json.dumps([hashes, token["hash"], token["vocab_size"], token["end"]])
        index["fingerprint"] = xxhash.xxh3_128_hexdigest(facts.encode())
    if isinstance(index, dict):
        index.pop("hash", None)
        index["hash"] = xxhash.xxh3_128_hexdigest(json.dumps(index, sort_keys=True).encode())
    return json.dumps(index).encode()


def signed(index: bytes, name: str, content: bytes) -> bytes:
    """The index.json of a dataset whose file `name` has that content."""
    made, whole = json.loads(index), xxhash.xxh3_128_hexdigest(content)
    if name == TOKENIZER:
        made["tokenizer"]["hash"] = whole
    for split in (made["train"], made["eval"]):
        for file in (*split["shards"], split["ends"]):
            if file["file"] == name:
                file |= {"hash": whole, "bytes": len(content)}
                file |= {"blocks": block_hashes(memoryview(content))} if "blocks" in file else {}
    return sealed(made)


def of_tokens(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    """A shard, or the ends of documents, with other numbers: what the file is does not change."""
    numbers = bytearray(data)
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, len(numbers) - 1))
        numbers[at] = draw(st.sampled_from([0, 1, 127, 128, 255]))
    return bytes(numbers)


def of_lines(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    lines = data.splitlines(keepends=True)
    at = draw(st.integers(0, len(lines) - 1))
    return b"".join([*lines[:at], of_json(lines[at], draw) + b"\n", *lines[at + 1 :]])


def of_yaml(data: bytes, draw: Callable[[Any], Any]) -> bytes:
    made = changed(yaml.safe_load(data), draw)
    try:
        return yaml.safe_dump(made, allow_unicode=True).encode()
    except RecursionError:
        return json.dumps(made).encode()  # nearly all JSON is YAML


RUN = [
    ["show", "run"], ["show", "run", "--json"], ["runs"], ["report", "run", "--json"], ["logs", "run"], ["watch", "run"],
    ["doctor", "run"], ["doctor", "run", "--json"], ["report", "run", "--out", "report.html"], ["trace", "run", "--timeout", "1"],
    ["profile", "run", "--duration", "0.1"],
]  # fmt: skip
CHECKPOINTS = [["checkpoint", "list", "run"], ["checkpoint", "verify", "run"], ["sample", "run", "--tokens", "2"]]
EXPORTS = [["checkpoint", "export", "run", "--out", "exported"], CHECKPOINTS[2]]
JOBS = [["plan", "job.yaml", "--vocab", "16"], ["doctor", "job.yaml"], ["deploy", "slurm", "job.yaml"]]
SWEPT = [["sweep", "results", "sweep"], ["sweep", "best", "sweep"], ["sweep", "report", "sweep"]]
DATA = [["data", "show", "data"], ["data", "verify", "data"], ["data", "show", "data", "--document", "0"]]
BATCH = ["data", "show", "data", "--job", "job.yaml", "--step", "1"]
FILES: dict[str, tuple[str, Callable[..., bytes], list[list[str]], int]] = {
    "job": ("job.yaml", of_yaml, JOBS, 8),
    "spec": ("runs/run/spec.yaml", of_yaml, [*RUN, *CHECKPOINTS[1:], *EXPORTS], 4),
    "state": ("runs/run/state.json", of_json, RUN, 8),
    "events": ("runs/run/events.jsonl", of_lines, RUN, 12),
    "metrics": ("runs/run/metrics/*", cut, [*RUN, ["show", "run", "--steps"]], 6),
    "samples": ("runs/run/samples/*", cut, [RUN[3], RUN[6], RUN[7], RUN[8]], 6),
    "fault": ("runs/run/faults/*.json", of_json, RUN[:2], 6),
    "lease": ("runs/run/drivers/*.json", of_json, [["stop", "run"], RUN[0]], 6),
    "manifest": ("runs/run/checkpoints/step-00000004/MANIFEST*", of_manifest, [*CHECKPOINTS, *EXPORTS], 10),
    "tensors": ("runs/run/checkpoints/step-00000004/shard*", cut, [*CHECKPOINTS[1:], *EXPORTS], 4),
    "deepspeed": ("ds.json", of_json, [["convert", "deepspeed", "ds.json"]], 12),
    "sweep": ("sweep.yaml", of_yaml, [["sweep", "sweep.yaml", "--dry-run"]], 8),
    "swept": ("runs/sweep/sweep.yaml", of_yaml, SWEPT[:1], 4),
    "cells": ("runs/sweep/cells.jsonl", of_lines, SWEPT[:2], 6),
    "log": ("runs/sweep/events/*.jsonl", of_lines, SWEPT, 6),
    "index": ("data/index.json", of_json, DATA[:2], 2),
    "sealed index": ("data/index.json", of_index, DATA, 24),
    "tokens": ("data/train-000000-000.arrow", cut, DATA[1:], 4),
    "tokenizer": ("data/tokenizer.json", of_json, DATA, 4),
    "signed tokens": ("data/train-000000-000.arrow", of_tokens, [*DATA, BATCH], 12),
    "signed ends": ("data/train-ends.bin", of_tokens, DATA, 8),
    "signed tokenizer": ("data/tokenizer.json", of_json, DATA, 8),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_no_file_breaks_a_command(folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Exit code 0, 2 or 3 within DEADLINE_S; no traceback; no control character of the file."""
    name, change, commands, few = FILES[kind]
    path = sorted(folder.glob(name))[0]
    original = (folder / "original" / path.relative_to(folder)).read_bytes()
    index, whole = folder / "data" / INDEX, (folder / "original" / "data" / INDEX).read_bytes()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RAYDIST_STORAGE", str(folder / "runs"))
    monkeypatch.setenv("RAYDIST_CACHE", str(folder / "cache"))
    monkeypatch.setenv("COLUMNS", "200")

    @settings(
        max_examples=EXAMPLES or few, derandomize=not EXAMPLES, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        way = data.draw(st.sampled_from([change, change, cut]))
        broken = way(original, data.draw)
        command = data.draw(st.sampled_from(commands))
        path.write_bytes(broken)
        if kind.startswith("signed"):
            index.write_bytes(signed(whole, path.name, broken))
        try:
            code, out, err = call(command)
        finally:
            path.write_bytes(original)
            index.write_bytes(whole)
            shutil.rmtree("exported", ignore_errors=True)
        told = f"{command}: {code}\n{broken[-2000:]!r}\n{out}\n{err}"
        assert code in (0, 2, 3), told
        assert "Traceback" not in err, told
        assert not CONTROL & set(out + err), told
        assert code == 0 or err.startswith("raydist: ") or "Usage: raydist" in err or command[1] == "verify", told

    holds()


class Hangs(BaseException):
    """The command did not end."""


def call(command: list[str]) -> tuple[int, str, str]:
    """A command in this process: exit code, stdout, stderr. Raises Hangs."""

    def stop(*_: Any) -> None:
        raise Hangs(command)

    out, err = io.StringIO(), io.StringIO()
    before = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.setitimer(signal.ITIMER_PROF, DEADLINE_S)
    signal.setitimer(signal.ITIMER_REAL, ASLEEP_S)
    path = list(sys.path)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(command)
        return 0, out.getvalue(), err.getvalue()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1, out.getvalue(), err.getvalue()
    finally:
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.path[:] = path
