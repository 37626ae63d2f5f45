"""Finds the newest checkpoint whose every hash is right, and loads it at any world size.

Runs in: each train worker, and in commands that need weights. Torch, never ray.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from raydist.checkpoint import manifest
from raydist.checkpoint.manifest import Manifest, TensorEntry
from raydist.checkpoint.mirrors import answer, replica_of
from raydist.checkpoint.retention import Lease
from raydist.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, RaydistError, StorageError
from raydist.records import Event
from raydist.redact import redact
from raydist.run.directory import Lineage, RunDir, manifest_name
from raydist.worker.checkpoint.dcp_storage import ShardReader, TensorPlanner
from raydist.worker.checkpoint.save_plan import rank_name

T = TypeVar("T")

_leases: dict[tuple[str, int], Lease] = {}
"""From `choose` to `load`, which are two calls: what this process is about to read."""


def choose(
    run: RunDir,
    *,
    step: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Manifest | None:
    """`choose_from` without replicas: the manifest alone."""
    chosen = choose_from(run, step=step, rank=rank, world_size=world_size, group=group, on_event=on_event)
    return chosen[1] if chosen is not None else None


def choose_from(
    run: RunDir,
    replicas: Sequence[str] = (),
    *,
    step: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    group: dist.ProcessGroup | None = None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> tuple[RunDir, Manifest] | None:
    """The newest committed checkpoint of which every byte is as it was written, or that of `step`, and where it is; None if
    there is none.

    A collective: the ranks share the reading, and agree. Of each step the run's own comes first, then the replicas'; then
    comes the step before. A bad checkpoint is passed over with an event checkpoint_rejected on rank 0, which names the files;
    replica_used and replica_failed say more. Until `load`, or for an hour, it is safe from pruning.
    Raises CheckpointCorrupt if there are checkpoints and none is good, or `step`'s is bad; CheckpointNotFound if `step`
    is not committed; StorageError if the run's own folder cannot be read.
    """

    def every(value: T) -> list[T]:
        values: list[T] = [value] * world_size
        if group is not None:
            dist.all_gather_object(values, value, group=group)
        return values

    rejected: list[str] = []
    passed: set[tuple[int, int]] = set()
    away: set[str] = set()

    def say(kind: str, **data: Any) -> None:
        if rank == 0:
            on_event(Event(kind, time.time(), data))

    def lost(uri: str, error: Exception) -> None:
        away.add(uri)
        say("replica_failed", replica=redact(uri), cause=getattr(error, "message", str(error)))

    if rank == 0 and step is None:
        for late, by, newer in run.void():
            file = f"{run.uri}/{manifest.path(late, manifest_name(by))}"
            cause = f"attempt {by} was cut off and committed too late: attempt {newer} had gone on from an earlier step"
            say("checkpoint_rejected", step=late, file=file, cause=cause)
    while True:
        found: Manifest | CheckpointError | None = None
        candidate: tuple[int, int] | None = None  # a step, and where: 0 is the run's own folder, then come the replicas
        if rank == 0 and step is not None:
            candidate, found = (step, 0), _claim(run, step, None)
        elif rank == 0:
            listed = {c: name for c, name in _listed(run, replicas, away, lost).items() if c not in passed}
            candidate = max(listed, key=lambda c: (c[0], -c[1]), default=None)
            found = _claim(_place(run, replicas, candidate[1]), candidate[0], listed[candidate]) if candidate else None
        candidate, found = every((candidate, found))[0]
        if candidate is None:
            break
        at, where = candidate
        problems: list[str] = []
        if isinstance(found, Manifest):
            share = _check_share(run, replicas, where, found, rank, world_size)
            problems = [p for of_rank in every(share) for p in of_rank]
            if not problems:
                if where and rank == 0:
                    say("replica_used", step=at, replica=replicas[where - 1])
                return _place(run, replicas, where), found
        elif isinstance(found, CheckpointCorrupt):
            problems = [found.message]
        elif step is not None and found is not None:
            raise found
        passed.add(candidate)
        if rank == 0:
            _release(_place(run, replicas, where), at)
        if problems:
            rejected += problems
            file, _, cause = problems[0].partition(": ")
            more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
            say("checkpoint_rejected", step=at, file=file, cause=cause + more)
        if step is not None:
            break
    if rejected:
        raise CheckpointCorrupt(
            f"{run.uri}: no checkpoint is as it was written:\n    " + "\n    ".join(rejected),
            "bring the files back from a copy, or start anew (--fresh)",
        )
    return None


def latest(run: RunDir) -> Manifest | None:
    """`choose` for one process: the newest good checkpoint."""
    return choose(run)


def _place(run: RunDir, replicas: Sequence[str], where: int) -> RunDir:
    return replica_of(run, replicas[where - 1]) if where else run


def _listed(
    run: RunDir, replicas: Sequence[str], away: set[str], lost: Callable[[str, Exception], None]
) -> dict[tuple[int, int], str]:
    """(step, place) -> the name of the manifest that counts there, by what all places together know of the attempts.

    `lost` is told of a replica that gives no answer, and puts it among those that are `away`.
    """

    def ask(look: Callable[[RunDir, Lineage], T], lineage: Lineage) -> dict[int, T]:
        answers = {0: look(run, lineage)}
        for where, uri in enumerate(replicas, start=1):
            if uri not in away:
                try:
                    answers[where] = answer(partial(lambda w: look(_place(run, replicas, w), lineage), where))
                except (RaydistError, OSError) as error:
                    lost(uri, error)
        return answers

    lineage = Lineage()
    for known in ask(lambda place, _: place.lineage(), lineage).values():
        lineage = lineage.joined(known)
    found = ask(lambda place, lineage: place.manifests(lineage), lineage)
    return {(step, where): name for where, steps in found.items() for step, name in steps.items()}


def _claim(run: RunDir, step: int, name: str | None) -> Manifest | CheckpointError | None:
    try:
        if run.manifest(step) is not None:
            _leases[run.uri, step] = Lease(run, step)
        return manifest.read(run, step, name)
    except (CheckpointCorrupt, CheckpointNotFound) as error:
        return error
    except StorageError as error:  # told to all ranks, who wait for this one's word
        return CheckpointCorrupt(error.message, error.hint)


def _release(run: RunDir, step: int) -> None:
    lease = _leases.pop((run.uri, step), None)
    if lease is not None:
        lease.release()


def _check_share(
    run: RunDir, replicas: Sequence[str], where: int, found: Manifest, rank: int, world_size: int
) -> list[str]:
    """What is wrong with this rank's share of the files: every world_size-th, the large ones spread first."""
    try:
        run = _place(run, replicas, where)
    except (RaydistError, OSError) as error:
        return [f"{replicas[where - 1]}: rank {rank} cannot reach it: {error}"]
    files = sorted(found.files.items(), key=lambda f: (-f[1].bytes, f[0]))[rank::world_size]
    problems = [manifest.check_file(run, found.step, name, entry) for name, entry in files]
    return [p for p in problems if p]


def load(
    run: RunDir,
    found: Manifest,
    tensors: Mapping[str, Tensor],
    rank_tensors: Mapping[str, Tensor],
    *,
    rank: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> bool:
    """Reads a chosen checkpoint into these tensors, in place, whatever number of ranks saved it. A collective.

    Names are whole by the part before their first `/` (model, optim): all of the checkpoint's, or none. `rank_tensors`
    are read, and True returned, only if as many ranks saved it and they held such tensors: a random state of another
    rank is nobody's. Raises CheckpointError naming tensors that are missing, unexpected or of another shape or dtype.
    """
    rank = rank if rank is not None else dist.get_rank(group) if group is not None else 0
    world_size = dist.get_world_size(group) if group is not None else 1
    problems = _mismatches(found.tensors, tensors)
    if problems:
        more = f"\n    and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(
            f"{run.uri}: the checkpoint of step {found.step} does not fit this model and optimizer:\n    "
            + "\n    ".join(problems[:20]) + more,
            "train it with the model and optimizer that it was saved with, or start anew (--fresh)",
        )  # fmt: skip
    own = {rank_name(rank, n): t for n, t in rank_tensors.items()}
    saved = {n for n in found.tensors if n.startswith(rank_name(rank, ""))}
    exact = found.world_size == world_size and own.keys() == saved and not _mismatches(found.tensors, own)
    exact = _all_agree(exact, group)
    if group is None:
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one rank is no mistake
    try:
        dcp_load(
            {**tensors, **own} if exact else dict(tensors),
            storage_reader=ShardReader(run, found),
            planner=TensorPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        at, (inner, _) = min(error.failures.items())
        text = getattr(inner, "message", None) or f"{type(inner).__name__}: {inner}"
        raise CheckpointError(f"{run.uri}: rank {at} could not read step {found.step}: {text}") from error
    finally:
        _release(run, found.step)
    return exact


def _all_agree(mine: bool, group: dist.ProcessGroup | None) -> bool:
    if group is None:
        return mine
    values = [mine] * dist.get_world_size(group)
    dist.all_gather_object(values, mine, group=group)
    return all(values)


def _mismatches(saved: Mapping[str, TensorEntry], wanted: Mapping[str, Tensor]) -> list[str]:
    """A line for each tensor that does not fit."""
    rooms = {name.partition("/")[0] for name in wanted}
    expected = {n: e for n, e in saved.items() if n.partition("/")[0] in rooms and not n.startswith("rank/")}
    problems = [f"{name}: not wanted here" for name in expected if name not in wanted]
    for name, tensor in wanted.items():
        entry = saved.get(name)
        if entry is None:
            problems.append(f"{name}: not in the checkpoint")
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != entry.shape:
            problems.append(f"{name}: saved with shape {list(entry.shape)}, wanted {list(tensor.shape)}")
        elif dtype != entry.dtype:
            problems.append(f"{name}: saved as {entry.dtype}, wanted {dtype}")
    return problems
