"""Copies of the training state in the memory of the nodes: saved beside training, and loaded without storage.

Runs in: each train worker. Torch, never ray. cluster/vault.py has the other half: an actor a node, which keeps each node's
copies on another node too.

    loop    vote(step) -> in the step's own all-reduce -> start(step) ... forward, backward ... before_update() | optimizer.step()
    thread                                      copy to a slot of shared memory ........ ^ done; hash, rename; rank 0: the manifest

A snapshot is a checkpoint in a folder of /dev/shm (vaultdir.py), made by the same Saver. Each rank copies straight into one of two
slots, files in shared memory that are allocated once: the one that holds the newest committed snapshot is never written to, so a
death in mid-copy costs nothing. Nothing here may cost the run more than time: what fails is told once, and training goes on.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from raydist.errors import CheckpointError, UserError
from raydist.records import Event
from raydist.rundir import CHECKPOINTS, RunDir, manifest_attempt, manifest_name
from raydist.worker.checkpoint import layout, manifest, vaultdir
from raydist.worker.checkpoint.layout import Part
from raydist.worker.checkpoint.manifest import FileEntry, Manifest
from raydist.worker.checkpoint.pace import Pace
from raydist.worker.checkpoint.save import Saver, SaveResult
from raydist.worker.checkpoint.staging import Stage
from raydist.worker.checkpoint.vaultdir import PEERS, SHARED, Shard, needs
from raydist.worker.checkpoint.writer import WRITE_BYTES, Commit, ShardWriter, plain_errors, written

T = TypeVar("T")

GATHER_BYTES = 64 << 20
CLOSE_S = 5.0
SEND_S = 30.0
"""How long a copy is waited for on its way to the buddy, before its cost is taken to be known."""
_SLOT = ".tmp-slot"
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


@dataclass(frozen=True, slots=True)
class VaultJob:
    """What the driver says to all ranks. `folder`: the same path on every node. `step`, `manifest`: of the snapshot to go on from,
    all of which is in this node's folder by now as far as its ranks need it; None: there is none.
    """

    folder: str
    step: int | None = None
    manifest: str | None = None


class Slot(Stage):
    """A stage whose buffer is a file in shared memory: what is copied here outlives this process.

    `path`: a file that an earlier process of this rank left, or where to make one.
    """

    def __init__(self, device: torch.device, folder: Path, path: Path) -> None:
        super().__init__(device)
        self._folder, self.path = folder, path
        self.holds = _snapshot_of(path)
        """(step, attempt) of the snapshot whose shard it is; None: of none."""

    def reserve(self, nbytes: int) -> None:
        """Allocates every page. Raises OSError (ENOSPC) where shared memory is full: a write there would be a bus error."""
        if nbytes == self._buffer.numel():
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, nbytes)
            os.posix_fallocate(file, 0, nbytes)
            pages = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(file)
        self._buffer = torch.frombuffer(pages, dtype=torch.uint8)
        self._layout = []
        if self._device.type == "cuda":
            _pin(self._buffer, self._device)

    def withdraw(self) -> None:
        """From now on its file is nobody's copy, and may be written."""
        if self.holds is None:
            return
        before, self.path = self.path, slot_path(self._folder, self.path.name)
        self.holds = None
        try:
            os.rename(before, self.path)
        except OSError:  # somebody has removed it: the next reserve() makes another
            self._buffer = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(OSError):  # others' are still in there, or it is gone
            before.parent.rmdir()

    def publish(self, step: int, name: str) -> None:
        """Its content is the shard `name` of `step`."""
        path = self._folder / manifest.path(step, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(self.path, path)
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)  # a peer of this node has just removed the empty folder
            os.rename(self.path, path)
        self.path, self.holds = path, _snapshot_of(path)


def _snapshot_of(path: Path) -> tuple[int, int] | None:
    """(step, attempt) of the snapshot that a shard is of; None for any other file. Two attempts may have taken the same step."""
    shard = Shard.parse(path.name)
    return (int(path.parent.name.removeprefix("step-")), shard.attempt) if shard else None


def slot_path(folder: Path, label: str) -> Path:
    """A name that no reader takes for a shard."""
    return folder / f"{_SLOT}-{label.removeprefix('shard-')[:14]}-{uuid.uuid4().hex[:8]}"


def _pin(buffer: Tensor, device: torch.device) -> None:
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE))
    if code:
        raise OSError(errno.ENOMEM, f"{buffer.nbytes:,} bytes could not be pinned (CUDA error {code})")
    weakref.finalize(buffer, _unpin, buffer.data_ptr(), device).atexit = False


def _unpin(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # no copy may be under way
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class SlotWriter(ShardWriter):
    """Makes a shard of a slot, where the bytes are already: hashes them. `publish(hash)` gives the file its name, and says it."""

    def __init__(
        self, run: RunDir, step: int, publish: Callable[[str], str], slot: Slot, parts: Sequence[Part], commit: Commit
    ) -> None:
        super().__init__(run, step, "", parts, slot.memory, commit)
        self._publish = publish

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """What another rank writes too (a replica) stays in the file, and is in nobody's plan."""
        placed: list[tuple[WriteItem, int, Part]] = []
        with plain_errors():
            for item in plan.items:
                part = self._parts[item.index.fqn, tuple(item.index.offset or ())]
                placed.append((item, part.start, part))
            hasher = xxhash.xxh3_128()
            for first in range(0, len(self._memory), WRITE_BYTES):
                hasher.update(self._memory[first : first + WRITE_BYTES])
            name = self._publish(hasher.hexdigest())
        self.busy = False
        return written(name, FileEntry(len(self._memory), hasher.hexdigest()), placed)


class Snapshots(Saver):
    """The Saver of snapshots: the same calls, at the same steps on every rank. A folder has one for each of its node's ranks.

    `kept`: (step, attempt) of the snapshot that this attempt went on from, which stays until there is a newer one. `on_event` gets
    notes.
    """

    def __init__(self, folder: Path, *, kept: tuple[int, int] | None, **saver: Any) -> None:
        super().__init__(RunDir(folder), asynchronous=True, keep=2, **saver)
        self._folder, self._kept = folder, kept
        self._slots: list[Slot] = []
        self._shard = ""
        self._linked: Path | None = None
        self._told: set[str] = set()

    def prepare(self, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor]) -> None:
        """Allocates both slots, in the background. No collective."""
        nbytes = self.nbytes(tensors, rank_tensors)
        slots = self._slots_for(tensors)

        def reserve() -> None:
            # What does not fit here is told by the first snapshot, where all ranks hear of it.
            with contextlib.suppress(OSError):
                for slot in slots:
                    if slot.holds is None:
                        slot.reserve(nbytes)

        self._warm = threading.Thread(target=reserve, name="raydist-vault-slots", daemon=True)
        self._warm.start()

    def nbytes(self, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor]) -> int:
        """Of this rank's shard."""
        parts = self._plan(tensors, rank_tensors)
        return layout.aligned(parts[-1].start + parts[-1].length)

    def start(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        rank_tensors: Mapping[str, Tensor],
        plain: Mapping[str, Any],
        *,
        last: bool = False,
    ) -> bool:
        """As the Saver's."""
        shared = [name for name, tensor in tensors.items() if not isinstance(tensor, DTensor)]
        peers = next((p for t in tensors.values() if isinstance(t, DTensor) and (p := _peers(t))), [])
        return super().start(step, tensors, rank_tensors, {**plain, SHARED: shared, PEERS: peers}, last=last)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Waits a little for the snapshot in flight. One that comes to nothing costs nothing."""
        save, self._save = self._save, None
        if save is not None:
            save.done.wait(timeout_s)
        if self._warm is not None:
            self._warm.join(timeout_s)

    # --- what the Saver calls

    def _settled(self, step: int) -> bool:
        """Always: the votes have said that no rank is busy, and what fails here is none of the run's business."""
        if self._save is not None:
            self._save.done.wait()
        return True

    def _plan(self, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor]) -> list[Part]:
        return layout.plan(tensors, rank_tensors, self._rank, self._world_size, GATHER_BYTES)

    def _slots_for(self, tensors: Mapping[str, Tensor]) -> list[Slot]:
        """Two, the first ones those that an earlier process of this rank left."""
        if not self._slots:
            place = f"shard-{self._rank:05d}-of-{self._world_size:05d}-"
            paths = sorted(self._folder.glob(f"{CHECKPOINTS}/step-*/{place}*.bin"))
            for path in [p for p in paths if p.stat().st_nlink > 1]:
                # Also what this node keeps for another one, from which the rank came: writing to it would spoil that copy.
                paths.remove(path)
                if _snapshot_of(path) == self._kept:
                    self._linked = path  # needed until there is a newer one
                else:
                    path.unlink()
            kept = [p for p in paths if _snapshot_of(p) == self._kept]
            others = [p for p in paths if p not in kept]
            others += self._folder.glob(f"{slot_path(self._folder, place).name[:-8]}*")
            for path in others[2 - len(kept) :]:
                path.unlink(missing_ok=True)
            paths = [*others[: 2 - len(kept)], *kept]
            paths += [slot_path(self._folder, place) for _ in range(2 - len(paths))]
            local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors.values())
            device = next((t.device for t in local if t.device.type == "cuda"), torch.device("cpu"))
            self._slots = [Slot(device, self._folder, path) for path in paths]
        return self._slots

    def _stage_for(self, tensors: Mapping[str, Tensor]) -> Stage:
        """A slot that does not hold the newest committed snapshot."""
        free = [s for s in self._slots_for(tensors) if s.holds is None or s.holds != self._kept]
        slot = min(free, key=lambda s: s.holds or (-1, 0))
        if slot.holds is not None and self._rank == 0:
            slot.path.with_name(manifest_name(slot.holds[1])).unlink(missing_ok=True)
        slot.withdraw()
        self._stage = slot
        return slot

    def _writer(self, step: int, parts: list[Part], stage: Stage, commit: Commit) -> ShardWriter:
        assert isinstance(stage, Slot)

        def publish(xxh3: str) -> str:
            self._shard = Shard(self._rank, self._world_size, self._attempt, xxh3).name
            stage.publish(step, self._shard)
            # At once, not when it is committed: copying it to another node may take a while.
            vaultdir.ring(self._folder, step=step, name=self._shard, kept=self._kept[0] if self._kept else None)
            return self._shard

        return SlotWriter(self._run, step, publish, stage, parts, commit)

    def _report(self, result: SaveResult) -> None:
        """On every rank, in the side thread."""
        if not result.committed:
            if result.cause not in self._told:
                self._told.add(str(result.cause))
                self._say(
                    "note", text=f"no copy in memory of step {result.step}: rank {result.failed_rank}: {result.cause}"
                )
            return
        self._kept = (result.step, self._attempt)
        for name in [self._shard, manifest_name(self._attempt)] if self._rank == 0 else [self._shard]:
            vaultdir.ring(self._folder, step=result.step, name=name, kept=result.step)
        if self._linked is not None:
            self._linked.unlink(missing_ok=True)
            self._linked = None

    def _tidy(self, step: int) -> None:
        """Nothing: what is old is written over."""


class Vault:
    """The snapshots of one attempt, as the loop uses them. All ranks make one, and call its methods at the same steps.

    `every`: recovery.snapshot_every. `resumed`: the step that the attempt goes on from. The other arguments are the Saver's.
    """

    def __init__(
        self,
        job: VaultJob,
        every: int | Literal["auto"],
        *,
        group: dist.ProcessGroup | None,
        resumed: int,
        **saver: Any,
    ) -> None:
        self._use, self._problem = None, ""
        try:
            self._use = vaultdir.Use(job.folder)
        except OSError as error:  # told where all ranks meet
            self._problem = f"no copies in memory: {job.folder}: {error}"
        self._folder = Path(job.folder)
        self._every, self._group = every, group
        self._rank, self._world_size = int(saver["rank"]), int(saver["world_size"])
        self._on_event: Callable[[Event], None] = saver["on_event"]
        attempt = manifest_attempt(job.manifest) if job.manifest is not None else None
        kept = (job.step, attempt) if job.step is not None and attempt is not None else None
        self._saver = Snapshots(Path(job.folder), kept=kept, group=group, **saver)
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
        shm, memory, held = (0, 0, 0) if problem else vaultdir.room(self._folder)
        mine = (vaultdir.node(), self._saver.nbytes(tensors, rank_tensors), shm + held, memory + held, problem)
        every = _every(mine, self._group, self._world_size)
        problems = [problem for *_, problem in every if problem]
        totals: dict[Any, int] = {}
        for node, nbytes, *_ in every:
            totals[node] = totals.get(node, 0) + nbytes
        buddies = max(totals.values()) if len(totals) > 1 else 0
        for node, total in totals.items():
            shm, memory = next((s, m) for n, _, s, m, _ in every if n == node)
            problem = vaultdir.no_room({"its ranks": 2 * total, "its buddy's": 2 * buddies}, shm, memory) or ""
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
        if self._rank == 0 and (sent := vaultdir.sent(self._folder)) is not None:
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
        """Processor time that this node's Vault took to send that copy, and to keep another node's; None while it does."""
        if self._every != "auto" or self._rank != 0 or not result.committed:
            return 0.0  # nobody asks what it costs
        sent = vaultdir.sent(self._folder)
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
    job: VaultJob,
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
        places = _every(vaultdir.node(), group, world_size)
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


def _peers(tensor: DTensor) -> list[list[int]]:
    """The ranks that hold the same box of it, group by group; [] if each has its own."""
    copies = [d for d, placement in enumerate(tensor.placements) if placement.is_replicate()]
    if not copies:
        return []
    ranks = tensor.device_mesh.mesh
    ranks = ranks.movedim(copies, list(range(-len(copies), 0)))
    groups: list[list[int]] = ranks.reshape(-1, int(torch.tensor(ranks.shape[-len(copies) :]).prod())).tolist()
    return groups


def _every(mine: T, group: dist.ProcessGroup | None, world_size: int) -> list[T]:
    every: list[T] = [mine] * world_size
    if group is not None:
        dist.all_gather_object(every, mine, group=group)
    return every
