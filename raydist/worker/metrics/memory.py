"""Memory of a rank: bytes by kind, the figures of torch's allocator, and its history for out-of-memory errors.

Runs in: each train worker. Torch, never ray. docs/explanation/memory.md explains the figures.

    training thread      before_update: measures the tensors once, before the second update
    telemetry thread     read: once per interval, the process and the allocator, no tensors
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
"""Shows a snapshot within the browser: the file is not sent anywhere."""

_UPDATES = 2
"""Tensors are measured before this update: the optimizer has created its state in the one before."""


@torch.no_grad()
def bytes_of(tensors: Iterable[Tensor], device: torch.device | None = None) -> int:
    """Bytes of the tensors' storages, each counted once; of a DTensor this rank's. `device`: only those on devices of its type."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    storages = (t.untyped_storage() for t in local if device is None or t.device.type == device.type)
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of a rank's state at one time, on the device, on the host or in a file. `on_device`: all of it on the device."""

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
        """The current bytes. Call it in the training thread after `grad_norm`, when gradients take the most memory."""
        parameters: list[Tensor] = [*model.parameters(), *(shard.local for shard in shards.values())]
        gradients = [p.grad for p in parameters if p.grad is not None]
        state = [t for slots in optimizer.state.values() for t in slots.values() if isinstance(t, Tensor)]
        here = sum(bytes_of(kind, device) for kind in (parameters, gradients, state))
        return cls(bytes_of(parameters), bytes_of(gradients), bytes_of(state), here)


class MemoryMeter:
    """The memory columns of a rank's row (raydist.run.telemetry_schema.RANK). `read` may be called in any thread."""

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
        """Call it in the training thread before each update. Measures once: the sizes do not change afterwards."""
        if self._updates < _UPDATES:
            self._updates += 1
            if self._updates == _UPDATES:
                # One assignment: it is atomic for other threads.
                self._held = Held.of(self._model, self._shards, self._optimizer, self._device)

    def read(self) -> dict[str, int | None]:
        """Bytes and counts by column; null for what does not exist, or not yet. On CUDA also resets the peak."""
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
    """The columns of torch's allocator, from `torch.cuda.memory_stats_as_nested_dict`; null without it.

    Activations are the peak minus the state on the device, so they include all temporary memory: communication buffers, copies of
    weights in fewer bits, and the model's buffers. 0 if no step reached its peak since the last reading.
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
    """`rss_bytes`, and its part `anon_bytes`, without file pages: reading a mapped dataset increases only the first."""
    text = Path(f"/proc/{pid}/status").read_text()
    sizes = {line.partition(":")[0]: line.split()[1] for line in text.splitlines() if line.startswith(("VmRSS", "Rss"))}
    kib = {name: int(size) for name, size in sizes.items()}
    if "VmRSS" not in kib:  # a zombie: exited, not reaped
        return {"rss_bytes": None, "anon_bytes": None}
    return {"rss_bytes": kib["VmRSS"] << 10, "anon_bytes": (kib["RssAnon"] + kib.get("RssShmem", 0)) << 10}


# --- the allocator's history


@dataclass(slots=True)
class _Target:
    """The files for this process's snapshots: see `keep_history`."""

    run: RunDir
    name: str
    taken: int = 0


_target: _Target | None = None
_taking = threading.Lock()


def keep_history(run: RunDir, rank: Rank, attempt: int, entries: int) -> None:
    """Sends snapshots of this process to the run's logs. On CUDA, if `entries` is not 0, torch records that many of the newest
    allocations and frees, with their Python stacks (about 2 us each, according to torch).
    """
    global _target
    _target = _Target(run, f"{LOGS}/attempt-{attempt:04d}/rank-{rank.rank:05d}.memory")
    if entries and rank.device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=entries, stacks="python", device=rank.device)


def snapshot() -> str | None:
    """Writes a snapshot of torch's CUDA allocator, with its history if it is recorded (`observe.memory_history`), to the run's
    logs, for torch's viewer (VIEWER). May be called in any thread of a rank, and in a model's own code.

    Returns the file's path or URI; on a CPU None, after a line on stderr, because torch tracks no CPU memory. Raises UserError
    outside of a run, and StorageError.
    """
    target = _target
    if target is None:
        raise UserError(
            "a memory snapshot is written to a run's folder, but this process is not a rank of a run",
            "call it in a run",
        )
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        print(f"raydist: no memory snapshot: {_NONE}", file=sys.stderr, flush=True)
        return None
    with _taking:
        # A pickle, because torch's viewer reads it; raydist never loads one.
        body = pickle.dumps(torch.cuda.memory._snapshot())
        target.taken += 1
        file = f"{target.name}-{target.taken}.pickle"
        target.run.storage.write(file, body)
    return f"{target.run.uri}/{file}"


def after_oom(rank: int, entries: int) -> str:
    """Takes a snapshot, while the error's frames still hold their tensors. Returns one sentence for the user, in any case."""
    failed = f"rank {rank} ran out of memory; "
    try:
        path = snapshot()
    except (StorageError, UserError) as error:
        return f"{failed}no memory snapshot: {error.message}"
    if path is None:
        return f"{failed}no memory snapshot: {_NONE}"
    hint = "" if entries else "; set observe.memory_history: 100000 to add the lines of code that allocated them"
    return f"{failed}a snapshot of the allocator's blocks is in {path}; open it at {VIEWER}{hint}"


_NONE = "torch does not track CPU memory"
