"""Trains some steps of a run again, on another number of workers of this machine, and compares every bit.

Runs in: the user's shell. Neither torch nor ray: the ranks are processes of `raydist.launch.standalone`.

The checkpoint that the steps start from is copied to a run of its own beside the run, which is deleted afterwards.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from raydist import registry
from raydist.checkpoint import manifest, mirrors, retention
from raydist.errors import TrainingStopped, UsageError
from raydist.private_files import temporary_folder
from raydist.run.directory import BUCKETS, COMM, RunDir, manifest_name
from raydist.run.log import SINGLE, read_steps
from raydist.spec import JobSpec, dump, read_stored

COMPARED = ("loss", "grad_norm", "lr", "tokens", "samples_hash")
"""Of each step's record."""
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class Replay:
    """Steps `first` to `last`, first trained on `before` workers, again on `workers`. `differences`: empty if no bit differs.

    `tensors`: compared at the last step; 0 if the run has no checkpoint there.
    """

    first: int
    last: int
    before: tuple[int, ...]
    workers: int
    tensors: int
    differences: tuple[str, ...]


def replay(run: RunDir, steps: int, start: int | None, workers: int | None, trust: bool = False) -> Replay:
    """Trains the `steps` after checkpoint `start` again. None: the newest one that so many steps follow; for `workers`: those of
    one replica, or of two if one trained them and there are as many virtual ranks. `trust`: code of one's own that the run's spec
    names may run.

    Raises UsageError where there is no such checkpoint, or the run need not have the same bits; TrainingStopped if a rank fails.
    """
    rows = {row["step"]: row for row in read_steps(run, SINGLE).to_pylist()}
    starts = [at for at in run.committed() if all(step in rows for step in range(at + 1, at + steps + 1))]
    if not starts or (start is not None and start not in starts):
        have = "no checkpoint" if start is None else f"no checkpoint of step {start}"
        raise UsageError(
            f"run {run.name}: {have} is followed by {steps} recorded steps",
            f"take fewer steps; checkpoints: {', '.join(map(str, run.committed())) or 'none'}, recorded up to step "
            f"{max(rows, default=0)}",
        )
    at = max(starts) if start is None else start
    again = range(at + 1, at + steps + 1)
    before = tuple(sorted({int(rows[step]["world_size"]) for step in again}))
    with temporary_folder() as folder:
        stored = folder / "job.yaml"
        spec = read_stored(run.storage)  # as of a stranger: no other file that it names is read
        stored.write_text(dump(spec))
        each = _each(spec)
        size = workers or _size(spec, before, each)
        if not trust:
            _refuse_own_code(spec)
        _refuse(spec, run, before, size)
        with ExitStack() as stack:
            stack.enter_context(retention.leased(run, at))
            copy = stack.enter_context(_copied(run, at))
            _train(stored, copy, at + steps, size, folder)
            found = {row["step"]: row for row in read_steps(copy, SINGLE).to_pylist()}
            differences = [
                f"step {step}: {name}: {rows[step][name]!r}, and again {found[step][name]!r}"
                for step in again
                for name in COMPARED
                if rows[step][name] != found[step][name]
            ]
            compared = 0
            if at + steps in run.committed():
                theirs, ours = hashes(run, at + steps), hashes(copy, at + steps)
                compared = len(theirs)
                differences += [
                    f"step {at + steps}: {name} differs" for name in theirs if theirs[name] != ours.get(name)
                ]
    return Replay(at + 1, at + steps, before, size, compared, tuple(differences))


def _each(spec: JobSpec) -> int:
    """Workers whose number divides that of a replay: whole replicas of the model, in whole copies of the state."""
    return math.lcm(spec.parallel.unit, spec.parallel.replica * (spec.parallel.shard or 1))


def _size(spec: JobSpec, before: tuple[int, ...], each: int) -> int:
    """Of a replay, where none is asked for: another than before, if the run's virtual ranks allow that."""
    most = None if spec.train.virtual_ranks is None else spec.train.virtual_ranks * spec.parallel.replica
    return each if before != (each,) or (most is not None and 2 * each > most) else 2 * each


def _refuse_own_code(spec: JobSpec) -> None:
    def walk(value: Any, field: str) -> None:
        if isinstance(value, dict):
            for key, inside in value.items():
                walk(inside, f"{field}.{key}".lstrip("."))
        elif isinstance(value, list):
            for inside in value:
                walk(inside, field)
        elif isinstance(value, str) and registry.is_own(value):
            raise UsageError(
                f"{field}: {value} is code that the run's files name, and nothing runs it unasked",
                "if you trust the author of the run, repeat the command with --trust, in the folder that holds that code",
            )

    walk(spec.model_dump(mode="json"), "")


def _refuse(spec: JobSpec, run: RunDir, before: tuple[int, ...], workers: int) -> None:
    count = spec.train.virtual_ranks
    if count is None and before != (workers,):
        raise UsageError(
            f"run {run.name} has no train.virtual_ranks: trained on {' and '.join(map(str, before))} workers, it has other bits on "
            f"{workers}",
            f"--workers {before[0]}" if len(before) == 1 else "replay steps of one number of workers",
        )
    each, most = _each(spec), (count or 0) * spec.parallel.replica
    if workers % each:
        raise UsageError(
            f"--workers {workers}: run {run.name} trains on a multiple of {each} workers (parallel)", f"take {each}"
        )
    if count is not None and workers > most:
        raise UsageError(
            f"--workers {workers}: run {run.name} has train.virtual_ranks: {count}", f"take at most {most}"
        )


@contextmanager
def _copied(run: RunDir, step: int) -> Iterator[RunDir]:
    """A run with that checkpoint alone, and with what the run has chosen by measurement, which the same bits depend on; deleted on
    exit."""
    name = f"{run.name}.replay-{os.getpid()}"
    copy = RunDir(run.home.at(name))
    try:
        mirrors.copy(run, copy, step, manifest_name(manifest.read(run, step).attempt))
        for chosen in (name for folder in (BUCKETS, COMM) for name in run.storage.files(folder)):
            copy.storage.write(chosen, run.storage.read(chosen))
        yield copy
    finally:
        for name in [*copy.storage.folders(), *copy.storage.files(unfinished=True)]:
            copy.storage.delete(name)
        if Path(copy.full_uri).is_dir():
            shutil.rmtree(copy.full_uri)


def _train(job: Path, copy: RunDir, until: int, workers: int, folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fields = [f"cluster.workers={workers}", f"checkpoint.every={until}", "checkpoint.replicas=[]", "eval.every=null"]
    command = [
        sys.executable,
        "-P",  # only what this command may import
        "-m",
        "raydist.launch.standalone",
        str(job),
        "--storage",
        copy.home.full_uri,
        "--name",
        copy.name,
    ]
    command += ["--until", str(until), "--json", *(part for field in fields for part in ("--set", field))]
    given = {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if workers > 1:
        env |= {name: str(value) for name, value in given.items()}
    ranks: list[subprocess.Popen[Any]] = []
    with ExitStack() as stack:
        try:
            for rank in range(workers):
                output = stack.enter_context(Path(folder, f"rank{rank}").open("w+"))
                own = env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if workers > 1 else {})
                ranks.append(subprocess.Popen(command, env=own, stdout=output, stderr=output))
            failed = first_failed(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
    if failed is not None:
        last = Path(folder, f"rank{failed}").read_text().strip().splitlines()[-1:]
        said = last[0] if last else f"exit code {ranks[failed].returncode}"
        raise TrainingStopped(f"rank {failed} of the replay: {said}", "")


def first_failed(ranks: Sequence[subprocess.Popen[Any]]) -> int | None:
    """Waits for all ranks, or for the first one that fails, which the others might wait for; its number. None: none has failed."""
    running = dict(enumerate(ranks))
    while running:
        for rank, process in list(running.items()):
            if process.poll() is not None:
                del running[rank]
                if process.returncode:
                    return rank
        time.sleep(_LOOK_S)
    return None


def hashes(run: RunDir, step: int) -> dict[str, str]:
    """The hash of each tensor of the model and the optimizer in a checkpoint, whatever the ranks that wrote it."""
    return {name: xxhash.xxh3_128_hexdigest(whole.data) for name, whole in tensors(run, step)}


def tensors(run: RunDir, step: int) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """The bytes of each of these tensors, whole."""
    found = manifest.read(run, step)
    for name, entry in found.tensors.items():
        if name.startswith(("model/", "optim/")):
            size = next((chunk.length // math.prod(chunk.sizes) for chunk in entry.chunks if chunk.length), 1)
            whole = np.zeros((*entry.shape, size), dtype=np.uint8)
            for chunk in entry.chunks:
                at = tuple(slice(first, first + n) for first, n in zip(chunk.offsets, chunk.sizes, strict=True))
                with run.storage.open(manifest.path(step, chunk.file)) as source:
                    source.seek(chunk.start)
                    whole[at] = np.frombuffer(source.read(chunk.length), dtype=np.uint8).reshape(*chunk.sizes, size)
            yield name, whole
