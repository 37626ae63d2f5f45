"""One rank's part of a snapshot: a checkpoint in a folder of shared memory, made by a Saver whose buffers are files there.

Runs in: each train worker. Torch, never ray. memory_manager.py decides when one is taken, and finds one to continue from.

Each rank copies directly into one of two slots, which are allocated once. The slot of the newest committed snapshot is never
written to: if a rank dies while it copies, that snapshot is intact.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from raydist.checkpoint import manifest, memory_layout
from raydist.checkpoint.manifest import FileEntry
from raydist.checkpoint.memory_layout import PEERS, SHARED, Shard
from raydist.run.directory import CHECKPOINTS, RunDir, manifest_name
from raydist.worker.checkpoint import save_plan
from raydist.worker.checkpoint.save import Saver
from raydist.worker.checkpoint.save_in_flight import SaveResult
from raydist.worker.checkpoint.save_plan import Part
from raydist.worker.checkpoint.shard_writer import WRITE_BYTES, Commit, ShardWriter, placed
from raydist.worker.checkpoint.staging import Stage, device_of
from raydist.worker.distributed import use_device
from raydist.worker.parameter_table import TensorTable

GATHER_BYTES = 64 << 20
CLOSE_S = 5.0
_SLOT = ".tmp-slot"


class Slot(Stage):
    """A stage whose buffer is a file in shared memory: its content outlives this process.

    `path`: a file of an earlier process of this rank, or of a new file.
    """

    def __init__(self, device: torch.device, folder: Path, path: Path) -> None:
        super().__init__(device)
        self._folder, self.path = folder, path
        self.holds = _snapshot_of(path)
        """(step, attempt) of the snapshot whose shard it is; None: it is free."""

    def reserve(self, nbytes: int) -> None:
        """Allocates every page. Raises OSError (ENOSPC) if shared memory is full: a write there would be a bus error."""
        use_device(self.device)
        if nbytes and nbytes == self._buffer.numel():
            return
        self._buffer = torch.empty(0, dtype=torch.uint8)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, nbytes)
            self._layout = []
            if not nbytes:  # a rank that has no part of a small state; its shard is empty, and there
                return
            os.posix_fallocate(file, 0, nbytes)
            pages = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        finally:
            os.close(file)
        self._buffer = torch.frombuffer(pages, dtype=torch.uint8)
        if self.device.type == "cuda":
            self.pin_buffer()

    def withdraw(self) -> None:
        """Invalidates its shard: the file is renamed, and may be written."""
        if self.holds is None:
            return
        before, self.path = self.path, slot_path(self._folder, self.path.name)
        self.holds = None
        try:
            os.rename(before, self.path)
        except OSError:  # another process has removed it: the next reserve() makes a new file
            self._buffer = torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(OSError):  # the folder has other files, or it is gone
            before.parent.rmdir()

    def publish(self, step: int, name: str) -> None:
        """Renames the file: its content is the shard `name` of `step`."""
        path = self._folder / manifest.path(step, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(self.path, path)
        except FileNotFoundError:
            path.parent.mkdir(
                parents=True, exist_ok=True
            )  # another rank of this node has just removed the empty folder
            os.rename(self.path, path)
        self.path, self.holds = path, _snapshot_of(path)


def _snapshot_of(path: Path) -> tuple[int, int] | None:
    """(step, attempt) of a shard's snapshot; None for any other file. Two attempts may have taken the same step."""
    shard = Shard.parse(path.name)
    return (int(path.parent.name.removeprefix("step-")), shard.attempt) if shard else None


def slot_path(folder: Path, label: str) -> Path:
    """A new name that is not a shard's."""
    return folder / f"{_SLOT}-{label.removeprefix('shard-')[:14]}-{uuid.uuid4().hex[:8]}"


class SlotWriter(ShardWriter):
    """Makes a slot a shard: hashes the bytes, which are there already. `publish(hash)` renames the file, and gives the name."""

    def __init__(
        self,
        run: RunDir,
        step: int,
        publish: Callable[[str], str],
        slot: Slot,
        parts: Sequence[Part],
        commit: Commit,
        group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(run, step, "", parts, slot.memory, commit, group)
        self._publish = publish

    def _write_parts(self, parts: Sequence[Part]) -> list[list[Any]]:
        """A part that another rank writes too (a replica) stays in the file, and is not among `parts`."""
        hasher = xxhash.xxh3_128()
        for first in range(0, len(self._memory), WRITE_BYTES):
            hasher.update(self._memory[first : first + WRITE_BYTES])
        name, file = self._publish(hasher.hexdigest()), FileEntry(len(self._memory), hasher.hexdigest())
        return placed(parts, [part.start for part in parts], name, file)


class MemorySaver(Saver):
    """The Saver of snapshots: the same calls, at the same steps on every rank. Each rank of a node has one for the node's folder.

    `kept`: (step, attempt) of the snapshot that this attempt continued from, which stays until there is a newer one. `on_event`
    gets notes.
    """

    def __init__(self, folder: Path, *, kept: tuple[int, int] | None, **saver: Any) -> None:
        super().__init__(RunDir(folder), asynchronous=True, keep=2, **saver)
        self._folder, self._kept = folder, kept
        self._slots: list[Slot] = []
        self._shard = ""
        self._linked: Path | None = None
        self._reported: set[str] = set()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Waits a little for the snapshot in flight. It may be lost: storage has the checkpoints."""
        save, self._save = self._save, None
        if save is not None:
            save.done.wait(timeout_s)
        if self._warm is not None:
            self._warm.join(timeout_s)

    # --- called by Saver

    def _settled(self, step: int) -> bool:
        """Always True: by the votes no rank is busy, and a failed snapshot does not stop the run."""
        if self._save is not None:
            self._save.done.wait()
        return True

    def _plan(
        self, tensors: Mapping[str, Tensor], rank_tensors: Mapping[str, Tensor], table: TensorTable
    ) -> list[Part]:
        return save_plan.plan(tensors, rank_tensors, table, GATHER_BYTES)

    def _plain_of(self, table: TensorTable, plain: dict[str, Any]) -> dict[str, Any]:
        """With the facts that decide which shards a rank needs: see memory_layout.needs."""
        shared = [name for name in table if table.held_by_all(name)]
        others = {group for name, row in table.items() if not table.held_by_all(name) for group in row.holders}
        return {**plain, SHARED: shared, PEERS: sorted(list(group) for group in others if len(group) > 1)}

    def _stages_for(self, tensors: Mapping[str, Tensor]) -> list[Slot]:
        return [slot for slot in self._slots_for(tensors) if slot.holds is None]

    def _slots_for(self, tensors: Mapping[str, Tensor]) -> list[Slot]:
        """Two slots, made of the files of an earlier process of this rank if there are any."""
        if not self._slots:
            place = f"shard-{self._rank:05d}-of-{self._world_size:05d}-"
            paths = sorted(p for p in memory_layout.files(self._folder / CHECKPOINTS) if p.match(f"{place}*.bin"))
            for path in [p for p in paths if p.stat().st_nlink > 1]:
                # A hard link: the node also keeps this file as a copy for the rank's earlier node, and a write would change that
                # copy.
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
            self._slots = [Slot(device_of(tensors), self._folder, path) for path in paths]
        return self._slots

    def _stage_for(self, tensors: Mapping[str, Tensor]) -> Stage:
        """A slot without the newest committed snapshot."""
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
            # Before the commit: the copy to another node may take a while.
            memory_layout.ring(self._folder, step=step, name=self._shard, kept=self._kept[0] if self._kept else None)
            return self._shard

        return SlotWriter(self._run, step, publish, stage, parts, commit, self._group)

    def _report(self, result: SaveResult) -> None:
        """On every rank, in the side thread."""
        if not result.committed:
            if result.cause not in self._reported:
                self._reported.add(str(result.cause))
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

    def _delete_old(self, step: int) -> None:
        """Does nothing: old snapshots are overwritten."""
