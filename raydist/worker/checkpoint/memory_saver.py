"""One rank's part of a snapshot: a checkpoint in a folder of shared memory, made by a Saver whose stages are files there.

Runs in: each train worker. Torch, never ray. memory_manager.py says when one is taken, and finds one to go on from.

Each rank copies straight into one of two slots, which are allocated once: the one that holds the newest committed snapshot is never
written to, so a death in mid-copy costs nothing.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from raydist.checkpoint import manifest, memory_layout
from raydist.checkpoint.manifest import FileEntry
from raydist.checkpoint.memory_layout import PEERS, SHARED, Shard
from raydist.run.directory import CHECKPOINTS, RunDir, manifest_name
from raydist.worker.checkpoint import save_plan
from raydist.worker.checkpoint.dcp_storage import WRITE_BYTES, Commit, ShardWriter, plain_errors, written
from raydist.worker.checkpoint.save import Saver, SaveResult
from raydist.worker.checkpoint.save_plan import Part
from raydist.worker.checkpoint.staging import Stage

GATHER_BYTES = 64 << 20
CLOSE_S = 5.0
_SLOT = ".tmp-slot"
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device


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


class MemorySaver(Saver):
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

        self._warm = threading.Thread(target=reserve, name="raydist-memory-slots", daemon=True)
        self._warm.start()

    def nbytes(self, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor]) -> int:
        """Of this rank's shard."""
        parts = self._plan(tensors, rank_tensors)
        return save_plan.aligned(parts[-1].start + parts[-1].length)

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
        return save_plan.plan(tensors, rank_tensors, self._rank, self._world_size, GATHER_BYTES)

    def _slots_for(self, tensors: Mapping[str, Tensor]) -> list[Slot]:
        """Two, the first ones those that an earlier process of this rank left."""
        if not self._slots:
            place = f"shard-{self._rank:05d}-of-{self._world_size:05d}-"
            paths = sorted(p for p in memory_layout.files(self._folder / CHECKPOINTS) if p.match(f"{place}*.bin"))
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
            memory_layout.ring(self._folder, step=step, name=self._shard, kept=self._kept[0] if self._kept else None)
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
            memory_layout.ring(self._folder, step=result.step, name=name, kept=result.step)
        if self._linked is not None:
            self._linked.unlink(missing_ok=True)
            self._linked = None

    def _tidy(self, step: int) -> None:
        """Nothing: what is old is written over."""


def _peers(tensor: DTensor) -> list[list[int]]:
    """The ranks that hold the same box of it, group by group; [] if each has its own."""
    copies = [d for d, placement in enumerate(tensor.placements) if placement.is_replicate()]
    if not copies:
        return []
    ranks = tensor.device_mesh.mesh
    ranks = ranks.movedim(copies, list(range(-len(copies), 0)))
    groups: list[list[int]] = ranks.reshape(-1, int(torch.tensor(ranks.shape[-len(copies) :]).prod())).tolist()
    return groups
