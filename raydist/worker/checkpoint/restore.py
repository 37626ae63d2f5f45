"""Finds the newest checkpoint whose hashes are all right, and loads it on any mesh.

Runs in: each train worker, and in commands that need weights. Torch, never ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from raydist.checkpoint import manifest
from raydist.checkpoint.manifest import Manifest, TensorEntry, mesh_of
from raydist.checkpoint.mirrors import answer, mounted, replica_of
from raydist.checkpoint.retention import Lease
from raydist.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    CheckpointTooNew,
    RaydistError,
    StorageError,
    error_facts,
    error_from,
)
from raydist.records import Event
from raydist.redact import redact
from raydist.run.directory import Lineage, RunDir, manifest_name
from raydist.worker.checkpoint import joined_state, shard_check
from raydist.worker.checkpoint.agreement import RankFailure, none_failed
from raydist.worker.checkpoint.extra_state import EXTRA, Joins, owner, tensor_name
from raydist.worker.checkpoint.save_plan import rank_name
from raydist.worker.checkpoint.shard_reader import ShardReader
from raydist.worker.comm.json_gather import broadcast_json, gather_json
from raydist.worker.parameter_table import dtype_name, gather_tensors

T = TypeVar("T")

_leases: dict[tuple[str, int], Lease] = {}
"""The leases of this process, from `choose` to `load`."""


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
    """(place, manifest) of the newest committed checkpoint whose bytes are all as they were written, or of `step`'s; None if there
    is none.

    A collective: the ranks share the reading, and agree. For each step, newest first, the run's own folder is tried, then the
    replicas. A bad checkpoint is skipped with an event checkpoint_rejected on rank 0, which names the files; see also the events
    replica_used and replica_failed. Until `load`, or for an hour, the checkpoint is not pruned.
    Raises CheckpointCorrupt if there are checkpoints and none is good, or `step`'s is bad; CheckpointTooNew if a newer raydist
    wrote it; CheckpointNotFound if `step` is not committed; StorageError if the run's own folder cannot be read, or a checkpoint
    there that may be whole: to go on from an earlier one would give it up for good.
    """
    rejected: list[str] = []
    unread: list[tuple[int, str]] = []  # (step, problem) of the run's own checkpoints
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
        claimed: tuple[Manifest, str] | RaydistError | None = None
        candidate: tuple[int, int] | None = None  # (step, place): 0 is the run's own folder, 1 the first replica
        if rank == 0 and step is not None:
            candidate, claimed = (step, 0), _claim(run, step, None)
        elif rank == 0:
            listed = {c: name for c, name in _listed(run, replicas, away, lost).items() if c not in passed}
            candidate = max(listed, key=lambda c: (c[0], -c[1]), default=None)
            if candidate and any(step > candidate[0] for step, _ in unread):
                candidate = None
            claimed = (
                _claim(_place(run, replicas, candidate[1]), candidate[0], listed[candidate]) if candidate else None
            )
        sent = broadcast_json([candidate, _encoded(claimed)], group)  # of rank 0, which alone has looked
        if sent[0] is None:
            break
        candidate = sent[0][0], sent[0][1]
        found = claimed[0] if isinstance(claimed, tuple) else _decoded(sent[1])
        at, where = candidate
        problems: list[str] = []
        if isinstance(found, Manifest):
            share = _share(run, replicas, where, found, rank, world_size)
            every = [(problem, whole) for of_rank in gather_json(share, group) for problem, whole in of_rank]
            problems = [problem for problem, _ in every]
            if problems and not where and all(whole for _, whole in every):
                unread.append((at, problems[0]))
                problems = []
            elif not problems:
                if where and rank == 0:
                    say("replica_used", step=at, replica=replicas[where - 1])
                return _place(run, replicas, where), found
        elif isinstance(found, CheckpointTooNew):
            raise found
        elif isinstance(found, StorageError) and not where:
            unread.append((at, found.message))
        elif isinstance(found, CheckpointCorrupt | StorageError):
            problems = [found.message]
        elif step is not None and found is not None:
            raise found
        passed.add(candidate)
        if rank == 0:
            release(_place(run, replicas, where), at)
        if problems:
            rejected += problems
            file, _, cause = problems[0].partition(": ")
            more = f" (and {len(problems) - 1} more files)" if len(problems) > 1 else ""
            say("checkpoint_rejected", step=at, file=file, cause=cause + more)
        if step is not None:
            break
    if unread:
        raise StorageError(
            f"the checkpoint of step {unread[0][0]}: {unread[0][1]}",
            "it may be whole, so it is not given up: the same command continues from it once storage can be read",
        )
    if rejected:
        raise CheckpointCorrupt(
            f"{run.uri}: all checkpoints are damaged:\n    " + "\n    ".join(rejected),
            "bring the files back from a copy, or start from the beginning (--fresh)",
        )
    return None


def _encoded(found: tuple[Manifest, str] | RaydistError | None) -> list[str] | None:
    """For `broadcast_json`."""
    if isinstance(found, tuple):
        return [found[1]]
    return None if found is None else error_facts(found)


def _decoded(sent: list[str] | None) -> Manifest | RaydistError | None:
    """The inverse of `_encoded`."""
    if sent is None:
        return None
    if len(sent) == 1:
        return Manifest.loads(sent[0].encode())
    return error_from(sent, CheckpointError)


def _place(run: RunDir, replicas: Sequence[str], where: int) -> RunDir:
    return replica_of(run, replicas[where - 1]) if where else run


def _listed(
    run: RunDir, replicas: Sequence[str], away: set[str], lost: Callable[[str, Exception], None]
) -> dict[tuple[int, int], str]:
    """(step, place) -> the name of the valid manifest there. Which manifests are valid follows from the attempts that all places
    know.

    `lost` is called for a replica that does not answer, and adds it to `away`.
    """

    def ask(look: Callable[[RunDir, Lineage], T], lineage: Lineage) -> dict[int, T]:
        answers = {0: look(run, lineage)}
        for where, uri in enumerate(replicas, start=1):
            if uri not in away:
                try:
                    answers[where] = answer(partial(lambda uri: look(mounted(run, uri), lineage), uri))
                except (RaydistError, OSError) as error:
                    lost(uri, error)
        return answers

    lineage = Lineage()
    for known in ask(lambda place, _: place.lineage(), lineage).values():
        lineage = lineage.joined(known)
    found = ask(lambda place, lineage: place.manifests(lineage), lineage)
    return {(step, where): name for where, steps in found.items() for step, name in steps.items()}


def _claim(run: RunDir, step: int, name: str | None) -> tuple[Manifest, str] | RaydistError:
    """Errors are sent to all ranks, which wait for rank 0."""
    deadline = time.monotonic() + shard_check.READ_AGAIN_S
    while True:
        try:
            if run.manifest(step) is not None and (run.uri, step) not in _leases:
                _leases[run.uri, step] = Lease(run, step)
            return manifest.read_with_text(run, step, name)
        except (CheckpointCorrupt, CheckpointNotFound) as error:
            return error
        except StorageError as error:
            if time.monotonic() > deadline:
                return CheckpointCorrupt(error.message, error.hint) if manifest.lost(error) else error
            time.sleep(shard_check.LOOK_S)


def _share(
    run: RunDir, replicas: Sequence[str], where: int, found: Manifest, rank: int, world_size: int
) -> list[tuple[str, bool]]:
    """`shard_check.problems` of that place."""
    try:
        place = _place(run, replicas, where)
    except (RaydistError, OSError) as error:
        return [(f"{replicas[where - 1]}: rank {rank} cannot reach it: {error}", False)]
    return shard_check.problems(place, found, rank, world_size)


def release(run: RunDir, step: int) -> None:
    """Lets a chosen checkpoint that is not loaded be pruned."""
    lease = _leases.pop((run.uri, step), None)
    if lease is not None:
        lease.release()


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` has read. `extra`: names of the extra states that were read; `anew`: name -> why it was not read. `partly`: those
    of which tensors with other shapes were not read."""

    extra: frozenset[str] = frozenset()
    anew: dict[str, str] = field(default_factory=dict)
    partly: frozenset[str] = frozenset()


def load(
    run: RunDir,
    found: Manifest,
    tensors: Mapping[str, Tensor],
    rank_tensors: Mapping[str, Tensor],
    *,
    rank: int | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: Mapping[str, int] | None = None,
    extra: Sequence[str] = (),
    joins: Mapping[str, Joins] = {},
) -> Loaded:
    """Reads a chosen checkpoint into these tensors, in place, whatever mesh saved it. A collective.

    Ranks may want different names: the union of all ranks' names must be the checkpoint's, for each first part of a name (model,
    optim). `rank_tensors`, of extra states, are read only on the `mesh` that saved them (None: all ranks data parallel), unless
    `joins` says how they take what other ranks had. `extra`: all registered extra states; see extra_state.py for when one is read.
    Raises CheckpointError that names tensors which are missing, unexpected or of another shape or dtype, on every rank.
    """
    rank = rank if rank is not None else dist.get_rank(group) if group is not None else 0
    world_size = dist.get_world_size(group) if group is not None else 1
    table = gather_tensors(tensors, rank, group)
    wanted = {name: (row.shape, row.dtype) for name, row in table.items()}
    problems = _mismatches(found.tensors, {name: facts for name, facts in wanted.items() if owner(name) is None})
    if problems:
        more = f"\n    and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise CheckpointError(
            f"{run.uri}: the checkpoint of step {found.step} does not fit this model and optimizer:\n    "
            + "\n    ".join(problems[:20]) + more,
            "train it with the model and optimizer that it was saved with, or start from the beginning (--fresh)",
        )  # fmt: skip
    same_mesh = mesh_of(mesh or {}, world_size) == found.mesh
    own = {rank_name(rank, n): t for n, t in rank_tensors.items()}
    sources = {name: joined_state.sources_of(found, name, rank_tensors, state) for name, state in joins.items()}
    why = {name: _why_anew(found, name, wanted, own, rank, same_mesh) for name in extra}
    not_joined = {name: joined_state.why_not(found, name, rank_tensors, sources[name]) for name in joins}
    moved = [name for name in joins if not same_mesh or joined_state.has_other_parts(found, own, rank, name)]
    reshaped = [n for n, those in sources.items() if those and joined_state.reshaped(found, rank_tensors, those)]
    every = gather_json([moved, why, not_joined, reshaped], group)
    joined = {name: joins[name] for moved, *_ in every for name in moved}
    anew = {
        name: why
        for _, exact, other, _ in reversed(every)
        for name, why in {**exact, **{name: other[name] for name in joined}}.items()
        if why is not None
    }
    read = {n: t for n, t in tensors.items() if owner(n) not in anew}
    own = {n: t for n, t in own.items() if owner(n.removeprefix(rank_name(rank, ""))) not in {*anew, *joined}}
    fill = ShardReader(run, found).fill
    failure: BaseException | None = None
    try:
        fill(read)
        if own:  # last: a replica's own state may be in the memory of tensors that all ranks have
            fill(own)
        if joined.keys() - anew.keys():
            joined_state.read(
                found,
                {n: t for n, t in rank_tensors.items() if owner(n) in joined.keys() - anew.keys()},
                joined,
                {
                    name: there
                    for state in joined.keys() - anew.keys()
                    for name, there in (sources[state] or {}).items()
                },
                fill,
            )
    except Exception as error:
        failure = error
    try:
        none_failed(failure, group)
    except RankFailure as failed:
        text = f"rank {failed.rank} could not read step {found.step}: {failed.error.message}"
        raise CheckpointError(f"{run.uri}: {text}") from failure
    finally:
        release(run, found.step)
    partly = {name for *_, names in every for name in names if name in joined} - anew.keys()
    return Loaded(frozenset(extra) - anew.keys(), anew, frozenset(partly))


def _why_anew(
    found: Manifest,
    name: str,
    wanted: Mapping[str, tuple[Sequence[int], str]],
    own: Mapping[str, Tensor],
    rank: int,
    same_mesh: bool,
) -> str | None:
    """Why this rank cannot load the extra state `name`; None if it can."""
    if name not in found.plain.get(EXTRA, {}):
        return "is not in the checkpoint"
    prefix = tensor_name(name, "")
    tensors = {n: facts for n, facts in wanted.items() if n.startswith(prefix)}
    saved = {n: entry for n, entry in found.tensors.items() if n.startswith(prefix)}
    if _mismatches(saved, tensors) or saved.keys() - tensors.keys():
        return "has other tensors than the saved state"
    if not any(n.startswith(rank_name(rank, prefix)) for n in own):
        return None
    if not same_mesh:
        return f"belongs to ranks, and was saved on the mesh {found.mesh}"
    return "has other tensors than the saved state" if _own_mismatches(found, own, rank, name) else None


def _own_mismatches(found: Manifest, own: Mapping[str, Tensor], rank: int, state: str) -> bool:
    """Whether this rank's own tensors of an extra state are others than the saved ones."""
    prefix = rank_name(rank, "")

    def belongs(name: str) -> bool:
        return name.startswith(prefix) and owner(name.removeprefix(prefix)) == state

    mine = {n: (tuple(t.shape), dtype_name(t.dtype)) for n, t in own.items() if belongs(n)}
    saved = {n: entry for n, entry in found.tensors.items() if belongs(n)}
    return mine.keys() != saved.keys() or bool(_mismatches(saved, mine))


def _mismatches(saved: Mapping[str, TensorEntry], wanted: Mapping[str, tuple[Sequence[int], str]]) -> list[str]:
    """A line for each tensor that does not fit. `wanted`: name -> (shape, dtype)."""
    kinds = {name.partition("/")[0] for name in wanted}
    expected = {n: e for n, e in saved.items() if n.partition("/")[0] in kinds and not n.startswith("rank/")}
    problems = [f"{name}: not wanted here" for name in expected if name not in wanted]
    for name, (shape, dtype) in wanted.items():
        entry = saved.get(name)
        if entry is None:
            problems.append(f"{name}: not in the checkpoint")
        elif tuple(shape) != entry.shape:
            problems.append(f"{name}: saved with shape {list(entry.shape)}, wanted {list(shape)}")
        elif dtype != entry.dtype:
            problems.append(f"{name}: saved as {entry.dtype}, wanted {dtype}")
    return problems
