"""Where a rank's memory goes: bytes by kind, what torch's allocator says, and its history around running out of memory.

Runs in: each train worker. Torch, never ray. docs/memory.md says what the figures mean.

    the loop's thread    before_update: the second time it looks at the tensors, and never again
    any other thread     read: once a second, the process and the allocator; no tensor is touched
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raydist.errors import StorageError, UserError
from raydist.run.directory import LOGS, RunDir
from raydist.worker.distributed import Rank
from raydist.worker.parallel import ParamShard

VIEWER = "https://docs.pytorch.org/memory_viz"
"""Opens a snapshot, in the browser alone: the file is not sent anywhere."""

_UPDATES = 2
"""Looked at before this update: the optimizer has made its state in the one before."""


@torch.no_grad()
def bytes_of(tensors: Iterable[Tensor], device: torch.device | None = None) -> int:
    """Of their storages, each once, of a DTensor this rank's; with `device` those on devices of its type only."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    storages = (t.untyped_storage() for t in local if device is None or t.device.type == device.type)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a rank's state at one moment, wherever it lies: device, host or file. `on_device`: of all three together."""

    parameters: int
    gradients: int
    optimizer: int
    on_device: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        shards: Mapping[str, ParamShard],
        optimizer: torch.optim.Optimizer,
        device: torch.device,
    ) -> Held:
        """As it is now. In the loop's thread: gradients are most, for every strategy, where `grad_norm` has been called."""
        parameters: list[Tensor] = [*model.parameters(), *(shard.local for shard in shards.values())]
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [t for slots in optimizer.state.values() for t in slots.values() if isinstance(t, Tensor)]
        here = sum(bytes_of(kind, device) for kind in (parameters, gradients, state))
        return cls(bytes_of(parameters), bytes_of(gradients), bytes_of(state), here)


class MemoryMeter:
    """The memory columns of a rank's row (raydist.run.telemetry_schema.RANK). `read` may be called by another thread than the
    loop's."""

    def __init__(
        self,
        device: torch.device,
        model: nn.Module,
        shards: Mapping[str, ParamShard],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._device, self._model, self._shards, self._optimizer = device, model, shards, optimizer
        self._updates = 0
        self._held: Held | None = None

    def before_update(self) -> None:
        """The loop's thread, before each update, gradients there: looks once, as none of it changes afterwards."""
        if self._updates < _UPDATES:
            self._updates += 1
            if self._updates == _UPDATES:
                # One assignment, which another thread sees whole or not at all.
                self._held = Held.of(self._model, self._shards, self._optimizer, self._device)

    def read(self) -> dict[str, int | None]:
        """Bytes and counts by column, null where there is no such thing, or not yet. From CUDA also starts a new peak."""
        held = self._held
        row: dict[str, int | None] = {
            "parameters_bytes": held.parameters if held else None,
            "gradients_bytes": held.gradients if held else None,
            "optimizer_bytes": held.optimizer if held else None,
            **process(),
        }
        if self._device.type != "cuda":
            return row | allocator(None, held)
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return row | allocator(stats, held)


def allocator(stats: Mapping[str, Any] | None, held: Held | None) -> dict[str, int | None]:
    """The columns of torch's allocator, out of `torch.cuda.memory_stats_as_nested_dict`; null without it.

    Activations are the peak less what the state has on the device, and so hold all that comes and goes: what is gathered and
    sent, copies of weights in fewer bits, the model's buffers. 0 where no step reached its peak since the reading before.
    """
    if stats is None:
        names = ("allocated", "reserved", "peak", "inactive", "activations")
        return {**{f"{name}_bytes": None for name in names}, "alloc_retries_count": None, "oom_count": None}
    allocated = stats["allocated_bytes"]["all"]
    return {
        "allocated_bytes": allocated["current"],
        "reserved_bytes": stats["reserved_bytes"]["all"]["current"],
        "peak_bytes": allocated["peak"],
        "inactive_bytes": stats["inactive_split_bytes"]["all"]["current"],
        "alloc_retries_count": stats["num_alloc_retries"],
        "oom_count": stats["num_ooms"],
        "activations_bytes": max(allocated["peak"] - held.on_device, 0) if held else None,
    }


def process(pid: int | str = "self") -> dict[str, int | None]:
    """`rss_bytes`, and of it `anon_bytes`, which no file backs: a mapped dataset grows the first as its pages are read."""
    text = Path(f"/proc/{pid}/status").read_text()
    sizes = {line.partition(":")[0]: line.split()[1] for line in text.splitlines() if line.startswith(("VmRSS", "Rss"))}
    kib = {name: int(size) for name, size in sizes.items()}
    if "VmRSS" not in kib:  # it has ended, and nobody has asked how
        return {"rss_bytes": None, "anon_bytes": None}
    return {"rss_bytes": kib["VmRSS"] << 10, "anon_bytes": (kib["RssAnon"] + kib.get("RssShmem", 0)) << 10}


# --- the allocator's history


@dataclass(slots=True)
class _Place:
    """Where this process's snapshots go: see `keep_history`."""

    run: RunDir
    name: str
    taken: int = 0


_place: _Place | None = None
_taking = threading.Lock()


def keep_history(run: RunDir, rank: Rank, attempt: int, entries: int) -> None:
    """From now on snapshots of this process go to the run's logs. On CUDA torch remembers, if `entries` is not 0, that many of the
    newest allocations and frees, with their Python stacks (about 2 us each, by torch's own word).
    """
    global _place
    _place = _Place(run, f"{LOGS}/attempt-{attempt:04d}/rank-{rank.rank:05d}.memory")
    if entries and rank.device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=entries, stacks="python", device=rank.device)


def snapshot() -> str | None:
    """Writes what torch's CUDA allocator holds now, and its history as far as it is kept (`observe.memory_history`), to the run's
    logs, for torch's viewer (VIEWER). From any thread of a rank, a model's own code included.

    Gives the file's path or URI; None on a CPU, after a line on stderr: torch keeps no such account there. Raises UserError outside
    of a run, StorageError.
    """
    place = _place
    if place is None:
        raise UserError(
            "a memory snapshot goes to a run's folder, and this process is no rank of one", "call it in a run"
        )
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        print(f"raydist: no memory snapshot: {_NONE}", file=sys.stderr, flush=True)
        return None
    with _taking:
        # A pickle, for that is what torch's viewer reads; raydist never loads one.
        body = pickle.dumps(torch.cuda.memory._snapshot())
        place.taken += 1
        file = f"{place.name}-{place.taken}.pickle"
        place.run.storage.write(file, body)
    return f"{place.run.uri}/{file}"


def after_oom(rank: int, entries: int) -> str:
    """Takes a snapshot, while the error's frames still hold their tensors. What to tell of it: one sentence, whatever happened."""
    told = f"rank {rank} ran out of memory; "
    try:
        path = snapshot()
    except (StorageError, UserError) as error:
        return f"{told}no snapshot of it: {error.message}"
    if path is None:
        return f"{told}no snapshot of it: {_NONE}"
    why = "" if entries else "; observe.memory_history: 100000 would add the lines that allocated them"
    return f"{told}the allocator's blocks are in {path}, which {VIEWER} shows{why}"


_NONE = "torch keeps no account of a CPU's memory"
