"""`raydist checkpoint list|verify|prune`: on a run folder only, by path and by name, as text and as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash

from raydist.checkpoint import manifest, retention
from raydist.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry
from raydist.cli.main import main
from raydist.data.prepare import prepare
from raydist.launch import replay, standalone
from raydist.launch.replay import hashes
from raydist.records import StepRecord
from raydist.run.directory import RunDir
from raydist.run.log import read_steps
from raydist.run.log_writer import RunLog


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run named `it` that keeps two checkpoints; steps 10 to 50, each of 1 MiB, of which 20 is the best."""
    run = RunDir(tmp_path / "it")
    run.storage.write("spec.yaml", b"data: {source: python-stdlib}\ntrain: {steps: 50}\ncheckpoint: {keep: 2}\n")
    data = bytes(1 << 20)
    files = {"shard-0.bin": FileEntry(len(data), xxhash.xxh3_128_hexdigest(data))}
    for step in range(10, 60, 10):
        made = Manifest(step, 2, 1, 1.7e9, "", files, {}, eval_loss=1.0 if step == 20 else 2.0 + step)
        run.storage.write(manifest.path(step, "shard-0.bin"), data)
        run.storage.write(manifest.path(step, "MANIFEST-0001.json"), made.dumps())
    return run


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `raydist checkpoint ...`."""
    with pytest.raises(SystemExit) as ended:
        main(["checkpoint", *arguments])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_list(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Every committed step with size and eval loss, and a mark on the best one; by name under --storage, and by path."""
    code, out, _ = call(capsys, "list", run.uri)
    assert code == 0
    assert [line.split()[:4] for line in out.splitlines()[1:]] == [
        [str(s), "1.0", "1.0000" if s == 20 else f"{2 + s:.4f}", "2"] for s in range(10, 60, 10)
    ]
    assert [line.endswith("best") for line in out.splitlines()[1:]] == [False, True, False, False, False]
    code, out, _ = call(capsys, "list", "it", "--storage", str(Path(run.uri).parent), "--json")
    rows: list[dict[str, Any]] = json.loads(out)
    assert [(r["step"], r["bytes"], r["best"]) for r in rows] == [(s, 1 << 20, s == 20) for s in range(10, 60, 10)]


def test_verify(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 if all is valid; 3 with the name of the bad file after a flipped byte, for all steps or for the given one."""
    assert call(capsys, "verify", run.uri)[0] == 0
    bad = Path(run.uri, manifest.path(30, "shard-0.bin"))
    bad.write_bytes(b"\1" + bad.read_bytes()[1:])
    code, out, err = call(capsys, "verify", run.uri)
    assert code == 3
    assert str(bad) in err
    assert "step 30: bad" in out
    code, out, _ = call(capsys, "verify", run.uri, "--json")
    assert code == 3
    assert [(r["step"], r["good"]) for r in json.loads(out)] == [(s, s != 30) for s in range(10, 60, 10)]
    assert call(capsys, "verify", run.uri, "--step", "40")[0] == 0
    assert call(capsys, "verify", run.uri, "--step", "30")[0] == 3
    code, _, err = call(capsys, "verify", run.uri, "--step", "35")
    assert code == 2
    assert "step 35" in err


def test_prune(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps the run's own `keep` or the given number, and the best; a checkpoint that is being read stays."""
    with retention.leased(run, 30):
        code, out, _ = call(capsys, "prune", run.uri, "--json")
    assert code == 0
    assert json.loads(out) == {"pruned": [10], "left": [20, 30, 40, 50]}
    code, out, _ = call(capsys, "prune", run.uri, "--keep", "1")
    assert "pruned 30, 40; left 20, 50" in out
    assert run.committed() == [20, 50]


def test_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, with the folder that was searched."""
    code, _, err = call(capsys, "list", "nobody", "--storage", str(tmp_path))
    assert code == 2
    assert str(tmp_path) in err


def recorded(run: RunDir, steps: int, world_size: int) -> None:
    """The records of a run's first steps."""
    record = StepRecord(0, 1.0, 1e-3, 1.0, 64, 0.1, 0.0, world_size, 1, "hash")
    log = RunLog(run)
    log.attempt(1, 0)
    log.steps([{**record.to_dict(), "step": step} for step in range(1, steps + 1)])
    log.close()


def test_what_cannot_be_replayed(run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too few steps after a checkpoint, other bits by design, more workers than virtual ranks, a spec that names code or another
    file: each is one line, with exit code 2, and leaves nothing behind."""
    recorded(run, 53, 2)
    code, _, err = call(capsys, "verify", run.uri, "--replay", "60")
    assert (code, "no checkpoint is followed by 60 recorded steps" in err) == (2, True)
    code, _, err = call(capsys, "verify", run.uri, "--replay", "4", "--step", "50")
    assert (code, "no checkpoint of step 50 is followed by 4 recorded steps" in err) == (2, True)
    code, _, err = call(capsys, "verify", run.uri, "--replay", "3")
    assert (code, "has no train.virtual_ranks: trained on 2 workers, it has other bits on 1" in err) == (2, True)
    run.storage.write("spec.yaml", b"data: {source: x}\ntrain: {steps: 50, micro_batch: 1, virtual_ranks: 4}\n")
    code, _, err = call(capsys, "verify", run.uri, "--replay", "3", "--workers", "5")
    assert (code, "--workers 5: run it has train.virtual_ranks: 4" in err) == (2, True)
    mesh = b"parallel: {tensor: 2, pipeline: 2}\nmodel: {layers: 2}\ncluster: {workers: 4}\n"
    run.storage.write("spec.yaml", b"data: {source: x}\ntrain: {steps: 50, micro_batch: 1, virtual_ranks: 4}\n" + mesh)
    for workers, says in (("6", "trains on a multiple of 4 workers (parallel)"), ("20", "has train.virtual_ranks: 4")):
        code, _, err = call(capsys, "verify", run.uri, "--replay", "3", "--workers", workers)
        assert (code, f"--workers {workers}: run it {says}" in err) == (2, True)
    assert call(capsys, "verify", run.uri, "--workers", "5")[0] == 2
    run.storage.write("spec.yaml", b"data: {source: x}\ntrain: {steps: 50}\nmodel: {name: 'evil.code:build'}\n")
    code, _, err = call(capsys, "verify", run.uri, "--replay", "3", "--workers", "2")
    assert (code, "model.name: evil.code:build is code that the run's files name" in err) == (2, True)
    (outside := tmp_path / "outside.yaml").write_text("data: {source: x}\ntrain: {steps: 50}\n")
    run.storage.write("spec.yaml", f"extends: {outside}\n".encode())
    code, _, err = call(capsys, "verify", run.uri, "--replay", "3", "--workers", "2")
    assert (code, f"{run.uri}/spec.yaml: extends: is for job files; a run's spec has all fields" in err) == (2, True)
    outside.unlink()
    assert [path.name for path in Path(run.uri).parent.iterdir()] == ["it"]


def test_a_replay_has_what_the_run_chose(run: RunDir) -> None:
    """The sizes of buckets, and the way of gradients, which were measured where the run began; then nothing is left."""
    names = ("buckets/world-00002.json", "comm/world-00002-compress-0.json")
    for name in names:
        run.storage.write(name, name.encode())
    with replay._copied(run, 50) as copy:
        assert [copy.storage.read(name) for name in names] == [name.encode() for name in names]
        assert copy.committed() == [50]
    assert [path.name for path in Path(run.uri).parent.iterdir()] == ["it"]


def test_a_replay_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run of one virtual rank, which is trained again on one worker: the loss of a step and a tensor of its checkpoint are
    changed, as a processor that computes wrongly would; exit code 3, and nothing else differs."""
    (tmp_path / "text.txt").write_text("so it goes. " * 200)
    job: dict[str, Any] = {
        "data": {"path": str(tmp_path / "tokens")},
        "model": {"layers": 1, "width": 16, "heads": 2, "context": 8},
        "train": {"steps": 4, "global_batch": 2, "micro_batch": 2, "virtual_ranks": 1},
        "checkpoint": {"every": 2},
        "eval": {"every": None},
    }
    prepare([str(tmp_path / "text.txt")], job["data"]["path"])
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    assert standalone.main([str(tmp_path / "job.yaml"), "--storage", str(tmp_path), "--name", "it", "--json"]) == 0
    run = RunDir(tmp_path / "it")
    saved = manifest.read(run, 4)
    tensor = next(name for name in saved.tensors if name.startswith("model/"))
    (chunk, *_) = saved.tensors[tensor].chunks
    shard = Path(run.uri, manifest.path(4, chunk.file))
    data = bytearray(shard.read_bytes())
    data[chunk.start] ^= 1
    shard.write_bytes(data)
    loss = read_steps(run)["loss"][2].as_py()
    for path in Path(run.uri, "metrics").glob("*.parquet"):
        table = pq.read_table(path)
        losses = [math.nextafter(x, 9.0) if x == loss else x for x in table["loss"].to_pylist()]
        pq.write_table(table.set_column(table.column_names.index("loss"), "loss", pa.array(losses)), path)
    capsys.readouterr()
    code, out, err = call(capsys, "verify", run.uri, "--replay", "2")
    assert (code, "trained on 1 workers, and again on 1: 2 differences" in out) == (3, True), out + err
    assert err.splitlines() == [
        f"raydist: step 3: loss: {math.nextafter(loss, 9.0)!r}, and again {loss!r}", f"raydist: step 4: {tensor} differs",
    ]  # fmt: skip


Box = tuple[slice, slice]


def saved(run: RunDir, step: int, boxes: list[Box], values: np.ndarray[Any, Any]) -> None:
    """A checkpoint of one matrix, cut into these boxes, one after another in the file."""
    chunks, start = [], 0
    for rows, columns in boxes:
        part = values[rows, columns]
        chunks.append(Chunk((rows.start, columns.start), part.shape, "s", start, part.nbytes))
        start += part.nbytes
    entry = TensorEntry("float32", values.shape, tuple(chunks))
    run.storage.write(manifest.path(step, "s"), b"".join(values[box].tobytes() for box in boxes))
    made = Manifest(step, 1, 1, 0.0, "", {}, {"model/w": entry, "rng/0": entry})
    run.storage.write(manifest.path(step, "MANIFEST-0001.json"), made.dumps())


def test_a_tensor_has_one_hash_whoever_wrote_it(tmp_path: Path) -> None:
    """In one chunk, in rows, or in rows and columns, the hash is the same; with another number it is another. Random states are not
    compared."""
    run, values = RunDir(tmp_path / "it"), np.arange(24, dtype=np.float32).reshape(4, 6)
    cut = [(slice(r, r + 2), slice(c, c + 3)) for c in (3, 0) for r in (0, 2)]
    saved(run, 1, [(slice(0, 4), slice(0, 6))], values)
    saved(run, 2, [(slice(3, 4), slice(0, 6)), (slice(0, 3), slice(0, 6))], values)
    saved(run, 3, cut, values)
    values[3, 5] = 0
    saved(run, 4, cut, values)
    whole, rows, boxes, other = (hashes(run, step) for step in (1, 2, 3, 4))
    assert whole == rows == boxes
    assert list(whole) == list(other) == ["model/w"]
    assert whole != other
