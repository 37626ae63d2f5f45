"""Whether ranks that are to hold the same bits do: hashes are compared, and an odd rank gets the state of the majority.

Runs in: each train worker. Torch, never ray. Every rank has one, and all decide alike, for all see the same hashes.

    a due step, its gradients there  parameters, optimizer state --differ--> majority   mended; the step is computed again
    a step whose numbers are bad                                             none       Rollback
    a checkpoint is to be saved      what it will hold                       the third  SuspectHardware, of the same device

Which ranks hold the same is read off the tensors: a plain one is the same on all ranks, a DTensor on those along the mesh
dimensions that replicate it. So ddp compares all, zero1 and zero2 the parameters, hsdp the groups' copies, and zero3 nothing.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raydist.errors import Rollback, StorageError, SuspectHardware
from raydist.run.directory import DRIFT, RunDir
from raydist.worker import distributed
from raydist.worker.distributed import Rank
from raydist.worker.metrics.reporter import Reporter
from raydist.worker.parallel import ParamShard, replicas
from raydist.worker.parallel._model_graph import plain_name

T = TypeVar("T")
Ranks = tuple[int, ...]

DRIFTS = 3
"""A device on which so many drifts were seen is not trusted any more."""
NAMES = 5
"""Most tensors that an event names."""
_CHUNK = 1 << 22
"""Elements that are hashed at a time on a device: they take 8 bytes each meanwhile."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Drift:
    """A tensor that differs where it should not. `majority`: those that agree, if more than half do, or (); `odd`: others."""

    tensor: str
    majority: Ranks
    odd: Ranks


class ReplicaCheck:
    """Around every step: `begin`, then `mended` where the gradients are there; `before_save` before each checkpoint.

    `due` says of a step whether to look before its update; `before_write` returns once nobody reads the state any more.
    """

    def __init__(
        self,
        rank: Rank,
        run: RunDir,
        attempt: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        shards: Mapping[str, ParamShard],
        *,
        due: Callable[[int], bool],
        before_write: Callable[[], None],
        reporter: Reporter | None,
    ) -> None:
        self._rank, self._run, self._attempt, self._reporter = rank, run, attempt, reporter
        self._model, self._optimizer, self._shards = model, optimizer, shards
        self._due, self._before_write = due, before_write
        weights = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        self._buffers = [b for n, b in model.state_dict(keep_vars=True).items() if n not in weights]
        self._undo: Callable[[], None] = lambda: None
        self.compares = bool(self._held(saved=False))
        """Whether any other rank holds what this one does; the same on all ranks."""

    def begin(self) -> None:
        """A step begins: what its passes change is kept, for it may have to be computed again."""
        if self.compares:
            self._undo = _passes_undone(self._rank.device, self._buffers)

    def mended(self, step: int, *, suspect: bool) -> bool:
        """Whether replicas had drifted in `step`, and are mended: its gradients, of odd weights, are of no use. Before the update.

        `suspect`: to be looked at even if it is not due. Raises Rollback where there is no majority, SuspectHardware, StorageError.
        """
        if not (suspect or self._due(step)) or not self._mend(step, saved=False):
            return False
        self._undo()
        return True

    def before_save(self, step: int) -> None:
        """What the checkpoint of `step` will hold is compared, and mended. Raises as `mended`."""
        self._mend(step, saved=True)

    def _held(self, saved: bool) -> dict[str, tuple[Tensor, Ranks]]:
        """Local tensors that other ranks hold too, and which ranks. `saved`: of parameters what this rank updates, for other
        ranks' rows may still be on their way here."""
        found: dict[str, tuple[Tensor, Ranks]] = {}
        for name, parameter in self._model.named_parameters():
            shard = self._shards.get(plain_name(name))
            value = shard.whole(shard.local.detach()) if saved and shard else parameter.detach()
            local = value.to_local() if isinstance(value, DTensor) else value
            found[f"model/{plain_name(name)}"] = local, self._holders(value)
        for name, shard in self._shards.items():
            for slot, value in self._optimizer.state.get(shard.local, {}).items():
                if isinstance(value, Tensor):
                    found[f"optim/{name}/{slot}"] = value, self._holders(shard.like)
        return {name: (tensor, ranks) for name, (tensor, ranks) in found.items() if len(ranks) > 1}

    def _holders(self, like: Tensor | None) -> Ranks:
        return next(group for group in replicas(like, self._rank.world_size) if self._rank.rank in group)

    def _mend(self, step: int, saved: bool) -> bool:
        held = self._held(saved)
        if not held:
            return False
        digests: dict[Ranks, dict[str, int]] = defaultdict(dict)
        for (name, (_, ranks)), digest in zip(held.items(), hashes(tensor for tensor, _ in held.values()), strict=True):
            digests[ranks][name] = digest
        # First one number a set of ranks, which is all that is sent while nothing is wrong.
        sums: dict[int, set[int]] = defaultdict(set)
        for mine in self._every({hash(ranks): hash(tuple(named.values())) for ranks, named in digests.items()}):
            for ranks_hash, total in mine.items():
                sums[ranks_hash].add(total)
        if all(len(totals) == 1 for totals in sums.values()):
            return False
        drifts = compare(self._every({k: named for k, named in digests.items() if len(sums[hash(k)]) > 1}))
        self._before_write()
        self._judge(step, drifts)
        for drift in drifts:
            if self._rank.rank in (drift.majority[0], *drift.odd):
                self._send(held[drift.tensor][0], drift)
        return True

    def _judge(self, step: int, drifts: list[Drift]) -> None:
        """Returns if all can be mended, once that is written down; else raises on every rank."""
        places = self._every(distributed.describe(self._rank))
        odd = [places[r] for r in sorted({r for drift in drifts for r in drift.odd})]
        names = [drift.tensor for drift in drifts[:NAMES]]
        suspects: list[dict[str, Any]] | StorageError = []
        if self._rank.first:
            try:
                suspects = self._written(step, odd, names)
            except StorageError as error:  # told to all ranks, who wait for this one's word
                suspects = error
        suspects = self._every(suspects)[0]
        if isinstance(suspects, StorageError):
            raise suspects
        action = "stop" if suspects else "repair" if all(drift.majority for drift in drifts) else "rollback"
        ranks = [place["rank"] for place in odd]
        if self._reporter:
            majority = list(drifts[0].majority)
            self._reporter.say(
                "replica_drift",
                step=step,
                action=action,
                ranks=ranks,
                tensors=names,
                count=len(drifts),
                majority=majority,
            )
            if action != "repair":
                self._reporter.flush()
        if suspects:
            named = ", ".join(f"rank {s['rank']} ({s['host']}, {s['node_ip']}, {s['device']})" for s in suspects)
            raise SuspectHardware(
                f"step {step}: weights drifted for the third time on {named}: {', '.join(names)}",
                f"test that hardware, or train without it; then delete {self._run.uri}/{DRIFT}, and the same command goes on",
            )
        if action == "rollback":
            which = ", ".join(map(str, ranks))
            raise Rollback(
                f"step {step}: ranks {which} hold different values of {', '.join(names)}, and no majority says which are right",
                "the next attempt goes on from the newest checkpoint",
            )

    def _written(self, step: int, odd: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
        """Writes the drift down; of the odd ranks those on devices that have now drifted too often."""
        storage = self._run.storage
        files = storage.files(DRIFT)
        seen: Counter[tuple[str, str]] = Counter()
        for file in files:
            try:
                seen.update({(p["host"], p["device"]) for p in json.loads(storage.read(file))["odd"]})
            except (ValueError, KeyError, TypeError) as error:
                raise StorageError(f"{self._run.uri}/{file} is no drift: {error}", "delete it") from error
        body = {"step": step, "attempt": self._attempt, "odd": odd, "tensors": names}
        storage.write(f"{DRIFT}/{len(files) + 1:06d}.json", json.dumps(body, sort_keys=True).encode() + b"\n")
        return [p for p in odd if seen[p["host"], p["device"]] + 1 >= DRIFTS]

    @torch.no_grad()
    def _send(self, local: Tensor, drift: Drift) -> None:
        """From the first of the majority to each odd rank; all go through the drifts in the same order."""
        if self._rank.rank == drift.majority[0]:
            for rank in drift.odd:
                dist.send(local.cpu().reshape(-1).view(torch.uint8), rank, group=self._rank.control)
        else:
            whole = torch.empty(local.shape, dtype=local.dtype)
            dist.recv(whole.view(-1).view(torch.uint8), drift.majority[0], group=self._rank.control)
            local.copy_(whole)

    def _every(self, mine: T) -> list[T]:
        every: list[T] = [mine] * self._rank.world_size
        dist.all_gather_object(every, mine, group=self._rank.control)
        return every


def _passes_undone(device: torch.device, buffers: list[Tensor]) -> Callable[[], None]:
    """Brings back what is drawn from and counted up by passes that follow now. As it comes before each step, in microseconds."""
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()  # models draw from these
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    values = [buffer.clone() for buffer in buffers]

    def undo() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(of_torch)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)

    return undo


def compare(every: list[dict[Ranks, dict[str, int]]]) -> list[Drift]:
    """What differs, by name. `every`: of each rank, by who holds them, its tensors' hashes."""
    found = []
    for ranks, name in sorted({(ranks, name) for mine in every for ranks, named in mine.items() for name in named}):
        by: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            by[every[rank][ranks][name]].append(rank)
        if len(by) > 1:
            most = max(by.values(), key=len)
            majority = tuple(most) if 2 * len(most) > len(ranks) else ()
            found.append(Drift(name, majority, tuple(r for r in ranks if r not in majority)))
    return sorted(found, key=lambda drift: drift.tensor)


def hashes(tensors: Iterable[Tensor]) -> list[int]:
    """A signed 64-bit hash of each tensor's bits: xxh3 on the host; on a device a sum there, read together in one copy.

    One flipped bit always changes it. Only hashes of one kind of device compare.
    """
    found: list[int | Tensor] = []
    for tensor in tensors:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        bits = tensor.detach().contiguous().view(-1).view(_INTEGERS[tensor.element_size()])
        if bits.device.type == "cpu":
            found.append(xxhash.xxh3_64_intdigest(bits.numpy().data) - (1 << 63))
        else:
            found.append(weighted(bits))
    on_device = [value for value in found if isinstance(value, Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else [])
    return [next(read) if isinstance(value, Tensor) else value for value in found]


def weighted(bits: Tensor) -> Tensor:
    """The sum of element i times 2i + 1, chunk by chunk, modulo 2^64. Odd factors lose no single bit."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in torch.split(bits, _CHUNK):
        total = total * 0x9E3779B1 + (chunk * _factors(bits.device)[: chunk.numel()]).sum()
    return total


@cache
def _factors(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * _CHUNK, 2, device=device)
