"""Copies of the training state in the nodes' memory: saved while training continues, and loaded without storage.

Runs in: each train worker. Torch, never ray. cluster/run/memory_store.py has the other half: an actor on each node, which
copies the node's snapshots to another node.

    loop    vote(step) -> in the step's own all-reduce -> start(step) ... forward, backward ... before_update() | optimizer.step()
    thread                                      copy to a slot of shared memory ........ ^ done; hash, rename; rank 0: the manifest

A snapshot is a checkpoint in a folder of /dev/shm (checkpoint/memory_layout.py), made by a Saver (memory_saver.py). A failure here
does not stop training: it is reported once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from raydist.checkpoint import manifest, memory_layout
from raydist.checkpoint.manifest import Manifest
from raydist.checkpoint.memory_layout import needs
from raydist.errors import CheckpointError, UserError
from raydist.records import Event
from raydist.run.directory import RunDir, manifest_attempt
from raydist.worker.checkpoint.memory_saver import MemorySaver
from raydist.worker.checkpoint.memory_sharing import held, spread
from raydist.worker.checkpoint.save_in_flight import SaveResult
from raydist.worker.checkpoint.snapshot_interval import SnapshotInterval
from raydist.worker.comm.json_gather import broadcast_json, gather_json

SEND_S = 30.0
"""After this time a snapshot's cost is final, even if its copy to the buddy has not arrived."""


@dataclass(frozen=True, slots=True)
class MemoryStoreJob:
    """Sent by the driver to all ranks. `folder`: the same path on every node. `step`, `manifest`: of the snapshot to continue from;
    the files that only ranks of this node need are in its folder; each that all ranks need is on some node. None: there is none.
    """

    folder: str
    step: int | None = None
    manifest: str | None = None


class MemoryCheckpointer:
    """The snapshots of one attempt, as the loop uses them. All ranks make one, and call its methods at the same steps.

    `every`: recovery.snapshot_every. `resumed`: the step that the attempt continues from. The other arguments are the Saver's.
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
        except OSError as error:  # `prepare` sends it to all ranks
            self._problem = f"no copies in memory: {job.folder}: {error}"
        self._folder = Path(job.folder)
        self._every, self._group = every, group
        self._rank, self._world_size = int(saver["rank"]), int(saver["world_size"])
        self._on_event: Callable[[Event], None] = saver["on_event"]
        attempt = manifest_attempt(job.manifest) if job.manifest is not None else None
        kept = (job.step, attempt) if job.step is not None and attempt is not None else None
        self._saver = MemorySaver(Path(job.folder), kept=kept, group=group, **saver)
        self._interval = SnapshotInterval(every, resumed)
        self._off = False
        self._ready = False
        self._reported: int | None = None
        self._attempt = int(saver["attempt"])
        self._kept: tuple[SaveResult, float] | None = None
        """The result of the snapshot that is still being sent to the buddy, and the time when it was committed."""
        self._sender_s = 0.0

    def prepare(self, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor]) -> None:
        """Allocates memory for the snapshots, after the first step. A collective: if a node lacks the memory, no rank allocates
        any.

        Raises UserError in that case, unless `every` is auto.
        """
        problem = self._problem
        shm, memory, held = (0, 0, 0) if problem else memory_layout.room(self._folder)
        nbytes = self._saver.nbytes(tensors, rank_tensors)
        every = gather_json([_node(), nbytes, shm + held, memory + held, problem], self._group)
        problems = [problem for *_, problem in every if problem]
        totals: dict[Any, int] = {}
        for node, nbytes, *_ in every:
            totals[node] = totals.get(node, 0) + nbytes
        buddies = max(totals.values()) if len(totals) > 1 else 0
        for node, total in totals.items():
            shm, memory = next((s, m) for n, _, s, m, _ in every if n == node)
            needed = {"its ranks": 2 * total, "its buddy's": 2 * buddies}
            if buddies:
                needed["messages between nodes"] = memory_layout.MESSAGE_ROOM
            problem = memory_layout.no_room(needed, shm, memory) or ""
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
        """This rank's vote on a snapshot after `step`, to be summed over the ranks; `due`: a checkpoint is saved after that step.

        The sum is 1.0 if a snapshot is to be taken: rank 0 wants one, and no rank is still busy with the previous one.
        """
        if self._off or not self._ready or due:
            return 0.0
        wanted = self._rank == 0 and self._interval.due(step)
        return 2.0 * self._saver.busy + wanted

    def start(
        self, step: int, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor], plain: Mapping[str, Any]
    ) -> None:
        """Takes the snapshot of `step`, if the votes require it."""
        self._interval.taken(step)
        if self._rank == 0 and (sent := memory_layout.sent(self._folder)) is not None:
            self._sender_s = sent[1]
        self._saver.start(step, tensors, rank_tensors, plain)

    def before_update(self) -> None:
        """See the Saver."""
        self._saver.before_update()

    def stepped(self, seconds: float, unusual: bool) -> None:
        """A step took so many seconds. `unusual`: it had other work than most steps. Decides on the interval."""
        self._interval.step(seconds, unusual)
        if (result := self._saver.poll()) is not None:
            self._kept = result, time.monotonic()
        if self._kept is not None and (sending := self._sent(*self._kept)) is not None:
            result, self._kept = self._kept[0], None
            self._interval.ended(result.committed, result.cpu_seconds + sending)
            self._report_interval()

    def _sent(self, result: SaveResult, at: float) -> float | None:
        """Processor time of this node's MemoryStore for sending that snapshot and keeping another node's; None while it is busy."""
        if self._every != "auto" or self._rank != 0 or not result.committed:
            return 0.0  # the cost is not needed
        sent = memory_layout.sent(self._folder)
        if sent is None:
            return 0.0
        (snapshot, seconds), now = sent, time.monotonic()
        over = snapshot == (result.step, self._attempt) or now - at > SEND_S
        return max(0.0, seconds - self._sender_s) if over else None

    def checkpoint(self, step: int) -> None:
        """A checkpoint of `step` is saved on storage, so a snapshot of that step is not needed."""
        self._interval.taken(step, checkpoint=True)

    def close(self) -> None:
        """Ends the snapshot in flight."""
        self._saver.close()
        if self._use is not None:
            self._use.close()

    def _report_interval(self) -> None:
        interval, cost, base = self._interval.interval, self._interval.cost, self._interval.base
        if self._every != "auto" or interval is None or cost is None or base is None:
            return
        if self._reported is None or not self._reported / 2 < interval < self._reported * 2:
            self._reported = interval
            self._say(
                f"a copy in memory every {interval} steps: each costs {1e3 * cost:.1f} ms, a step takes {1e3 * base:.1f} ms",
                copy_seconds=cost,
            )

    def _say(self, text: str, **data: float) -> None:
        if self._rank == 0:
            self._on_event(Event("note", time.time(), {"text": text, **data}))


def choose(
    job: MemoryStoreJob,
    *,
    rank: int,
    world_size: int,
    group: dist.ProcessGroup | None,
    on_event: Callable[[Event], None] = lambda event: None,
) -> Manifest | None:
    """The snapshot that the driver names, if all files that the ranks need have their hashes; else None. Those that all ranks read
    are first sent to the nodes that lack them.

    A collective. The event checkpoint_rejected gives the reason; the attempt then continues from storage.
    """
    if job.step is None or job.manifest is None:
        return None
    run = RunDir(job.folder)
    found: Manifest | None = None
    mine = {"manifest": "", "problem": ""}
    if rank == 0:
        try:
            found, mine["manifest"] = manifest.read_with_text(run, job.step, job.manifest)
        except (CheckpointError, OSError) as error:
            mine["problem"] = f"{run.uri}/{manifest.path(job.step, job.manifest)}: {error}"
    sent = broadcast_json(mine, group)
    if rank and not sent["problem"]:
        found = Manifest.loads(sent["manifest"].encode())
    problems: list[str] = [sent["problem"]]
    if found is not None:
        shared, own = needs(found, rank, world_size)
        every = gather_json([_node(), held(Path(job.folder), found, names := sorted(shared))], group)
        here = [r for r, (node, _) in enumerate(every) if node == every[rank][0]]
        mine_bad = spread(Path(job.folder), found, names, every, rank, group)
        for name in sorted({*names[here.index(rank) :: len(here)], *own}):
            problem = manifest.check_file(run, job.step, name, found.files[name])
            mine_bad += [problem] if problem else []
        # The ranks of a node share the work on its shared files; each must know of every problem.
        problems = [p for of_rank in gather_json(mine_bad[:1], group) for p in of_rank]
    if problems:
        file, _, cause = problems[0].partition(": ")
        on_event(Event("checkpoint_rejected", time.time(), {"step": job.step, "file": file, "cause": cause}))
        return None
    return found


def _node() -> str:
    """Equal for the ranks that share memory."""
    return "/".join(map(str, memory_layout.node()))
