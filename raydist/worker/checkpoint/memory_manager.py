"""Copies of the training state in the memory of the nodes: saved beside training, and loaded without storage.

Runs in: each train worker. Torch, never ray. cluster/run/memory_checkpoints.py has the other half: an actor a node, which keeps
each node's copies on another node too.

    loop    vote(step) -> in the step's own all-reduce -> start(step) ... forward, backward ... before_update() | optimizer.step()
    thread                                      copy to a slot of shared memory ........ ^ done; hash, rename; rank 0: the manifest

A snapshot is a checkpoint in a folder of /dev/shm (checkpoint/memory_layout.py), made by the same Saver (memory_saver.py). Nothing
here may cost the run more than time: what fails is told once, and training goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch.distributed as dist
from torch import Tensor

from raydist.checkpoint import manifest, memory_layout
from raydist.checkpoint.manifest import Manifest
from raydist.checkpoint.memory_layout import needs
from raydist.errors import CheckpointError, UserError
from raydist.records import Event
from raydist.run.directory import RunDir, manifest_attempt
from raydist.worker.checkpoint.memory_saver import MemorySaver
from raydist.worker.checkpoint.save import SaveResult
from raydist.worker.checkpoint.snapshot_interval import Pace

T = TypeVar("T")

SEND_S = 30.0
"""How long a copy is waited for on its way to the buddy, before its cost is taken to be known."""


@dataclass(frozen=True, slots=True)
class MemoryStoreJob:
    """What the driver says to all ranks. `folder`: the same path on every node. `step`, `manifest`: of the snapshot to go on from,
    all of which is in this node's folder by now as far as its ranks need it; None: there is none.
    """

    folder: str
    step: int | None = None
    manifest: str | None = None


class MemoryCheckpointer:
    """The snapshots of one attempt, as the loop uses them. All ranks make one, and call its methods at the same steps.

    `every`: recovery.snapshot_every. `resumed`: the step that the attempt goes on from. The other arguments are the Saver's.
    """

    def __init__(
        self,
        job: MemoryStoreJob,
        every: int | Literal["auto"],
        *,
        group: dist.ProcessGroup | None,
        resumed: int,
        **saver: Any,
    ) -> None:
        self._use, self._problem = None, ""
        try:
            self._use = memory_layout.Use(job.folder)
        except OSError as error:  # told where all ranks meet
            self._problem = f"no copies in memory: {job.folder}: {error}"
        self._folder = Path(job.folder)
        self._every, self._group = every, group
        self._rank, self._world_size = int(saver["rank"]), int(saver["world_size"])
        self._on_event: Callable[[Event], None] = saver["on_event"]
        attempt = manifest_attempt(job.manifest) if job.manifest is not None else None
        kept = (job.step, attempt) if job.step is not None and attempt is not None else None
        self._saver = MemorySaver(Path(job.folder), kept=kept, group=group, **saver)
        self._pace = Pace(every, resumed)
        self._off = False
        self._ready = False
        self._told: int | None = None
        self._attempt = int(saver["attempt"])
        self._kept: tuple[SaveResult, float] | None = None
        """What became of the copy whose sending is not over, and when that was."""
        self._sender_s = 0.0

    def prepare(self, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor]) -> None:
        """Makes room for the copies, after the first step. A collective: where a node lacks the memory, no rank takes any.

        Raises UserError then, if snapshots were asked for (`every` is no auto).
        """
        problem = self._problem
        shm, memory, held = (0, 0, 0) if problem else memory_layout.room(self._folder)
        mine = (memory_layout.node(), self._saver.nbytes(tensors, rank_tensors), shm + held, memory + held, problem)
        every = _every(mine, self._group, self._world_size)
        problems = [problem for *_, problem in every if problem]
        totals: dict[Any, int] = {}
        for node, nbytes, *_ in every:
            totals[node] = totals.get(node, 0) + nbytes
        buddies = max(totals.values()) if len(totals) > 1 else 0
        for node, total in totals.items():
            shm, memory = next((s, m) for n, _, s, m, _ in every if n == node)
            problem = memory_layout.no_room({"its ranks": 2 * total, "its buddy's": 2 * buddies}, shm, memory) or ""
            problems += [problem] if problem else []
        if problems and self._every != "auto":
            raise UserError(problems[0])
        if problems:
            self._off = True
            self._say(problems[0])
            return
        self._saver.prepare(tensors, rank_tensors)
        self._ready = True

    def vote(self, step: int, due: bool) -> float:
        """This rank's word on a snapshot after `step`, to be summed over the ranks; `due`: a checkpoint on storage comes there.

        The sum is 1.0 where one is to be taken: rank 0 wants it, and no rank is still busy with the one before.
        """
        if self._off or not self._ready or due:
            return 0.0
        wanted = self._rank == 0 and self._pace.due(step)
        return 2.0 * self._saver.busy + wanted

    def start(
        self, step: int, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
    ) -> None:
        """The snapshot of `step`; where the votes said so."""
        self._pace.taken(step)
        if self._rank == 0 and (sent := memory_layout.sent(self._folder)) is not None:
            self._sender_s = sent[1]
        self._saver.start(step, tensors, rank_tensors, plain)

    def before_update(self) -> None:
        """See the Saver."""
        self._saver.before_update()

    def stepped(self, seconds: float, unusual: bool) -> None:
        """A step took so long since the one before: for the pace. `unusual`: something else went on beside it."""
        self._pace.step(seconds, unusual)
        if (result := self._saver.poll()) is not None:
            self._kept = result, time.monotonic()
        if self._kept is not None and (sending := self._sent(*self._kept)) is not None:
            result, self._kept = self._kept[0], None
            self._pace.ended(result.committed, result.cpu_seconds + sending)
            self._tell_pace()

    def _sent(self, result: SaveResult, at: float) -> float | None:
        """Processor time that this node's MemoryCheckpointer took to send that copy, and to keep another node's; None while it
        does."""
        if self._every != "auto" or self._rank != 0 or not result.committed:
            return 0.0  # nobody asks what it costs
        sent = memory_layout.sent(self._folder)
        if sent is None:
            return 0.0
        (snapshot, seconds), now = sent, time.monotonic()
        over = snapshot == (result.step, self._attempt) or now - at > SEND_S
        return max(0.0, seconds - self._sender_s) if over else None

    def checkpoint(self, step: int) -> None:
        """A checkpoint of `step` goes to storage: a snapshot would be no newer."""
        self._pace.taken(step, checkpoint=True)

    def close(self) -> None:
        """Ends what is on its way."""
        self._saver.close()
        if self._use is not None:
            self._use.close()

    def _tell_pace(self) -> None:
        interval, cost, base = self._pace.interval, self._pace.cost, self._pace.base
        if self._every != "auto" or interval is None or cost is None or base is None:
            return
        if self._told is None or not self._told / 2 < interval < self._told * 2:
            self._told = interval
            self._say(
                f"a copy in memory every {interval} steps: each costs {1e3 * cost:.1f} ms, a step takes {1e3 * base:.1f} ms"
            )

    def _say(self, text: str) -> None:
        if self._rank == 0:
            self._on_event(Event("note", time.time(), {"text": text}))


def choose(
    job: MemoryStoreJob,
    *,
    rank: int,
    world_size: int,
    group: dist.ProcessGroup | None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Manifest | None:
    """The snapshot that the driver names, if all that this node's ranks need of it is there and has its hash; else None.

    A collective. Why not is told as the event checkpoint_rejected; storage then has to do.
    """
    if job.step is None or job.manifest is None:
        return None
    run = RunDir(job.folder)
    found: list[Manifest | str] = [""]
    if rank == 0:
        try:
            found = [manifest.read(run, job.step, job.manifest)]
        except (CheckpointError, OSError) as error:
            found = [f"{run.uri}/{manifest.path(job.step, job.manifest)}: {error}"]
    if group is not None:
        dist.broadcast_object_list(found, src=dist.get_global_rank(group, 0), group=group)
    problems: list[str] = []
    if isinstance(found[0], Manifest):
        shared, own = needs(found[0], rank, world_size)
        places = _every(memory_layout.node(), group, world_size)
        here = [r for r, place in enumerate(places) if place == places[rank]]
        for name in sorted({*sorted(shared)[here.index(rank) :: len(here)], *own}):
            problem = manifest.check_file(run, job.step, name, found[0].files[name])
            problems += [problem] if problem else []
        # The others of this node look into the rest of what it shares, but each must know that it is there.
        problems = [p for of_rank in _every(problems[:1], group, world_size) for p in of_rank]
    else:
        problems = [found[0]]
    if problems:
        file, _, cause = problems[0].partition(": ")
        on_event(Event("checkpoint_rejected", time.time(), {"step": job.step, "file": file, "cause": cause}))
        return None
    assert isinstance(found[0], Manifest)
    return found[0]


def _every(mine: T, group: dist.ProcessGroup | None, world_size: int) -> list[T]:
    every: list[T] = [mine] * world_size
    if group is not None:
        dist.all_gather_object(every, mine, group=group)
    return every
