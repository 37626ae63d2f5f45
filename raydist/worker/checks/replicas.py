"""Compares the bits of ranks that should hold the same: by hashes. A rank that differs receives the state of the majority.

Runs in: each train worker. Torch, never ray. Every rank has one, and all decide the same, because all see the same hashes.

    a due step, its gradients exist  parameters, optimizer state --differ--> majority       repaired; the step is computed again
    a step with bad numbers                                                  no majority    Rollback
    before a checkpoint is saved     the state that it will hold             the third time on one device    SuspectHardware

The table of all parameters (worker/parameter_table.py) says which ranks hold the same bits. So ddp compares everything, zero1 and
zero2 the parameters, hsdp the copies of each group, and zero3 nothing. Where replicas train apart (`comm.every`), ranks of one are
compared, and of all replicas the weights after the steps that bring them together.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from raydist.errors import Rollback, StorageError, SuspectHardware
from raydist.parsing import parse_json
from raydist.run.directory import DRIFT, RunDir
from raydist.worker import distributed
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.distributed import Rank
from raydist.worker.mesh import Mesh
from raydist.worker.metrics.reporter import Reporter
from raydist.worker.parallel._model_graph import plain_name
from raydist.worker.parallel._split import LayerSplit
from raydist.worker.parameter_table import ParameterTable, Ranks
from raydist.worker.step_hooks import Step, StepHook

DRIFTS = 3
"""A device with so many drifts is no longer used."""
NAMES = 5
"""An event names at most so many tensors."""
_CHUNK = 1 << 22
"""Elements that are hashed at a time on a device; each takes 8 bytes of memory."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Drift:
    """A tensor that differs between ranks that should hold the same. `majority`: the ranks that agree, if more than half, or ();
    `odd`: the others."""

    tensor: str
    majority: Ranks
    odd: Ranks


class ReplicaCheck(StepHook):
    """A hook of every step; and `before_save`, which the loop calls before each checkpoint and each copy in memory.

    `due(step)`: whether to compare before the update of `step`; `before_write` returns once no save reads the state any more.
    `replica`: the mesh of this rank's replica, if replicas train apart; `together(step)`: whether after that step all have the
    same weights.
    """

    def __init__(
        self,
        rank: Rank,
        run: RunDir,
        attempt: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: ParameterTable,
        *,
        split: LayerSplit | None = None,
        due: Callable[[int], bool],
        before_write: Callable[[], None],
        reporter: Reporter | None,
        replica: Mesh | None = None,
        together: Callable[[int], bool] = lambda step: False,
    ) -> None:
        self._replica, self._together = replica, together
        self._rank, self._run, self._attempt, self._reporter = rank, run, attempt, reporter
        self._model, self._optimizer, self._parameters = model, optimizer, parameters
        self._due, self._before_write, self._layers = due, before_write, split
        weights = {n for n, _ in model.named_parameters(remove_duplicate=False)}
        self._buffers = [b for n, b in model.state_dict(keep_vars=True).items() if n not in weights]
        self._named = {name: p for n, p in model.named_parameters() if (name := plain_name(n)) in parameters}
        mine = [name for name, p in self._named.items() if isinstance(p, DTensor)]
        self._split = {name for of_rank in gather_json(mine, rank.control) for name in of_rank}
        """Parameters that the module holds a part of; the same on all ranks."""
        self._kept: list[Tensor] = []
        self.compares = any(len(group) > 1 for name in parameters for group in self._groups(name, True))
        """Whether any two ranks hold the same bits; the same on all ranks."""

    def begin(self, step: Step) -> None:
        """Keeps what the passes change, because they may have to run again."""
        if self.compares:
            self._kept = [buffer.clone() for buffer in self._buffers]

    def recompute(self, step: Step, suspect: bool) -> bool:
        """Whether replicas had drifted, and are repaired: the gradients, of wrong weights, are of no use.

        `suspect`: compare even if no comparison is due. Raises Rollback if there is no majority, SuspectHardware, StorageError.
        """
        if not (suspect or self._due(step.number)) or not self._mend(step.number, saved=False):
            return False
        for buffer, value in zip(self._buffers, self._kept, strict=True):
            buffer.copy_(value)
        return True

    def before_save(self, step: int) -> bool:
        """Compares and repairs the state that the checkpoint of `step` will hold: whether any rank has other values now, the same
        on all ranks. Raises as `recompute`."""
        return self._mend(step, saved=True)

    def _groups(self, name: str, together: bool) -> tuple[Ranks, ...]:
        """The ranks in groups whose module has the same bits of a parameter. zero1 and zero2 have it whole (or the part that
        the layer has of it), whatever rows a rank updates; the module of zero3 and hsdp has the rows that the rank updates.
        `together`: of all replicas, if these train apart; else of each."""
        row = self._parameters[name]
        found = row.holders
        if name not in self._split:
            found = (row.ranks,) if self._layers is None else self._layers.same(name, row.ranks)
        if self._replica is None or together:
            return found
        copy = self._replica.copy
        return tuple(tuple(r for r in group if copy(r) == c) for group in found for c in sorted({*map(copy, group)}))

    def _held(self, saved: bool, together: bool) -> dict[str, tuple[Tensor, Ranks]]:
        """Local tensors that other ranks hold too, and all these ranks. `saved`: of parameters only the part that this rank
        updates,
        because other ranks' rows may still be in transfer."""
        found: dict[str, tuple[Tensor, Ranks]] = {}
        shards = self._parameters.shards
        for name, parameter in self._named.items():
            shard = shards.get(name)
            value = shard.local.detach() if saved and shard else parameter.detach()
            local = value.to_local() if isinstance(value, DTensor) else value
            if saved and shard and self._replica is None:
                ranks = self._parameters.group(name)
            else:
                ranks = next((group for group in self._groups(name, together) if self._rank.rank in group), ())
            found[f"model/{name}"] = local, ranks
        for name, shard in shards.items():
            for slot, value in self._optimizer.state.get(shard.local, {}).items():
                if isinstance(value, Tensor):
                    found[f"optim/{name}/{slot}"] = value, self._own(self._parameters.group(name))
        return {name: (tensor, ranks) for name, (tensor, ranks) in found.items() if len(ranks) > 1}

    def _own(self, ranks: Ranks) -> Ranks:
        """Those of this rank's replica."""
        if self._replica is None:
            return ranks
        copy = self._replica.copy
        return tuple(rank for rank in ranks if copy(rank) == copy(self._rank.rank))

    def _mend(self, step: int, saved: bool) -> bool:
        if not self.compares:
            return False
        held = self._held(saved, self._together(step if saved else step - 1))
        digests: dict[Ranks, dict[str, int]] = defaultdict(dict)
        for (name, (_, ranks)), digest in zip(held.items(), hashes(tensor for tensor, _ in held.values()), strict=True):
            digests[ranks][name] = digest
        # First one number a group of ranks: while nothing is wrong, no more is sent.
        sums: dict[str, set[str]] = defaultdict(set)
        for mine in gather_json({str(ranks): _digest(named) for ranks, named in digests.items()}, self._rank.control):
            for ranks_text, total in mine.items():
                sums[ranks_text].add(total)
        if all(len(totals) == 1 for totals in sums.values()):
            return False
        sent: list[Any] = [[list(ranks), named] for ranks, named in digests.items() if len(sums[str(ranks)]) > 1]
        drifts = compare(
            [{tuple(ranks): named for ranks, named in of_rank} for of_rank in gather_json(sent, self._rank.control)]
        )
        self._before_write()
        self._judge(step, drifts)
        for drift in drifts:
            if self._rank.rank in (drift.majority[0], *drift.odd):
                self._send(held[drift.tensor][0], drift)
        return True

    def _judge(self, step: int, drifts: list[Drift]) -> None:
        """Returns if all can be repaired, once the drift is recorded; else raises on every rank."""
        places = gather_json(distributed.describe(self._rank), self._rank.control)
        odd = [places[r] for r in sorted({r for drift in drifts for r in drift.odd})]
        names = [drift.tensor for drift in drifts[:NAMES]]
        mine: dict[str, Any] = {"suspects": []}
        if self._rank.first:
            try:
                mine = {"suspects": self._written(step, odd, names)}
            except StorageError as error:  # sent to all ranks, which wait for rank 0
                mine = {"error": [error.message, error.hint]}
        sent = gather_json(mine, self._rank.control)[0]
        if "error" in sent:
            raise StorageError(*sent["error"])
        suspects = sent["suspects"]
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
                f"test that hardware, or train without it; then delete {self._run.uri}/{DRIFT}, and the same command resumes",
            )
        if action == "rollback":
            which = ", ".join(map(str, ranks))
            raise Rollback(
                f"step {step}: ranks {which} hold different values of {', '.join(names)}, and no majority says which are right",
                "the next attempt resumes from the newest checkpoint",
            )

    def _written(self, step: int, odd: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
        """Records the drift; gives the odd ranks whose devices have now drifted too often."""
        storage = self._run.storage
        files = storage.files(DRIFT)
        seen: Counter[tuple[str, str]] = Counter()
        for file in files:
            try:
                seen.update({(p["host"], p["device"]) for p in parse_json(storage.read(file))["odd"]})
            except (ValueError, KeyError, TypeError) as error:
                raise StorageError(f"{self._run.uri}/{file} is no drift: {error}", "delete it") from error
        body = {"step": step, "attempt": self._attempt, "odd": odd, "tensors": names}
        storage.write(f"{DRIFT}/{len(files) + 1:06d}.json", json.dumps(body, sort_keys=True).encode() + b"\n")
        return [p for p in odd if seen[p["host"], p["device"]] + 1 >= DRIFTS]

    @torch.no_grad()
    def _send(self, local: Tensor, drift: Drift) -> None:
        """Sends from the first of the majority to each odd rank; all ranks send in the order of the drifts."""
        if self._rank.rank == drift.majority[0]:
            for rank in drift.odd:
                dist.send(local.cpu().reshape(-1).view(torch.uint8), rank, group=self._rank.control)
        else:
            whole = torch.empty(local.shape, dtype=local.dtype)
            dist.recv(whole.view(-1).view(torch.uint8), drift.majority[0], group=self._rank.control)
            local.copy_(whole)


def _digest(named: Mapping[str, int]) -> str:
    """One hash of names and hashes."""
    return xxhash.xxh3_64_hexdigest(repr(sorted(named.items())).encode())


def compare(every: list[dict[Ranks, dict[str, int]]]) -> list[Drift]:
    """The tensors that differ, by name. `every`: of each rank, by the ranks that hold the same, its tensors' hashes."""
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
    """A signed 64-bit hash of each tensor's bits: xxh3 on the host; on a device a sum there, all read in one copy.

    One flipped bit always changes it. Only hashes of the same kind of device can be compared.
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
    """The sum of element i times 2i + 1, chunk by chunk, modulo 2^64. With odd factors every single bit counts."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in torch.split(bits, _CHUNK):
        total = total * 0x9E3779B1 + (chunk * _factors(bits.device)[: chunk.numel()]).sum()
    return total


@cache
def _factors(device: torch.device) -> Tensor:
    return torch.arange(1, 2 * _CHUNK, 2, device=device)
