"""The passes of micro-batches through the stages of one rank, and the transfers between stages.

Runs in: each train worker. Torch, never ray. The order of the passes is in worker/pipeline_schedule.py. A receive starts one or
two actions before its use, so it overlaps with a computation; no action waits for a send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from raydist.data.batches import MicroBatch
from raydist.worker.distributed import Rank
from raydist.worker.parallel import ParallelStrategy, Work
from raydist.worker.parts import Parts
from raydist.worker.pipeline_schedule import Action, neighbours, receives_ahead, way

Entry = tuple[tuple[int, ...], torch.dtype]
"""What passes between two stages: its shape without the micro-batch's size, and its dtype."""


@dataclass(slots=True)
class Stage:
    """One stage on this rank. `number`: of all stages. `entry`, `exit`: its input and its output, once `wrap` has found them, for
    sequences of `time` tokens of this rank."""

    number: int
    module: nn.Module
    strategy: ParallelStrategy
    entry: Entry | None = None
    exit: Entry | None = None
    time: int = 0

    def passed(self, kind: str, tokens: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what arrives for a forward or a backward pass of these tokens.

        Where sequences have another length than the example's, the first dimension after the micro-batch is that of the sequence.
        """
        passes_on = self.entry if kind == "forward" else self.exit
        assert passes_on is not None, "wrap has run the example"
        shape, dtype = passes_on
        if tokens.shape[1:] and tokens.shape[1] != self.time:
            shape = (shape[0] * tokens.shape[1] // self.time, *shape[1:])
        return (len(tokens), *shape), dtype


@dataclass(frozen=True, slots=True)
class Links:
    """How the stages of a replica reach each other: stage s is on the world rank `peers[s % len(peers)]`. `ways`: the group of each
    way. `stages`: of the whole model."""

    peers: Sequence[int]
    ways: Mapping[int, dist.ProcessGroup]
    stages: int

    def is_last(self, stage: Stage) -> bool:
        """Whether it computes the loss."""
        return stage.number == self.stages - 1

    def peer(self, number: int) -> int:
        """The world rank of a stage."""
        return self.peers[number % len(self.peers)]

    def way(self, source: int, target: int) -> dict[str, Any]:
        """Group and tag for a transfer between two stages."""
        tag = way(source, target, len(self.peers))
        return {"group": self.ways[tag], "tag": tag}

    def connect(self, rank: Rank) -> None:
        """The first transfers, those of a way at once. A collective of the peers. NCCL connects two ranks at their first transfer,
        and until both have started it, it holds up their hosts, which may have to start another one first."""
        size, token = len(self.peers), torch.zeros(1, device=rank.device)
        pairs = {(way(*pair, size), *(stage % size for stage in pair)) for pair in neighbours(self.stages)}
        for tag, group in self.ways.items():
            ops = []
            for _, sender, receiver in sorted(pair for pair in pairs if pair[0] == tag):
                if rank.rank in (ends := (self.peers[sender], self.peers[receiver])):
                    op = dist.isend if rank.rank == ends[0] else dist.irecv
                    ops.append(dist.P2POp(op, token.clone(), ends[rank.rank == ends[0]], group, tag))
            for transfer in dist.batch_isend_irecv(ops) if ops else []:
                transfer.wait()


@dataclass(slots=True)
class _Kept:
    """Between the forward and the backward pass of a micro-batch in a stage: its input; its loss, or the output's place in the
    graph."""

    entered: Tensor | None
    made: Tensor | GradientEdge


class BoundStage:
    """A stage with its input. It is called with the arguments of the whole model, and otherwise has what the stage has."""

    def __init__(self, module: nn.Module, hidden: Tensor | None) -> None:
        self._module, self._hidden = module, hidden
        self.out: Any = None
        self.time = 0

    def __call__(self, tokens: Tensor, **more: Any) -> Tensor:
        self.time = tokens.shape[1] if tokens.ndim > 1 else 0
        if self._hidden is None:
            self.out = self._module(tokens, **more)
        elif isinstance(self._module, nn.Sequential):
            self.out = self._module(self._hidden, **more)
        else:
            self.out = self._module(tokens, hidden=self._hidden, **more)
        made: Tensor = self.out
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


@dataclass(slots=True)
class Passes:
    """One series of passes over the stages of this rank. `most_sends`: transfers that may be under way. `most_kept`: the most
    micro-batches that were between their passes."""

    stages: Sequence[Stage]
    links: Links
    parts: Parts | None
    device: torch.device
    most_sends: int
    order: list[Action]
    micro_batches: Sequence[MicroBatch]
    work: Work
    most_kept: int = 0
    _kept: dict[tuple[int, int], _Kept] = field(default_factory=dict)
    _received: dict[Action, tuple[Tensor, dist.Work | None]] = field(default_factory=dict)
    _sent: dict[Action, tuple[dist.Work, Tensor]] = field(default_factory=dict)
    """Transfers that may not have ended. gloo's cannot be asked."""

    def __call__(self) -> None:
        last_of = {action.index: at for at, action in enumerate(self.order)}
        contexts: dict[int, ExitStack] = {}
        ahead = receives_ahead(self.device.type)
        with ExitStack() as every:
            for at, action in enumerate(self.order):
                if action.index not in contexts:
                    contexts[action.index] = every.enter_context(ExitStack())
                    contexts[action.index].enter_context(self.work.around(action.index))
                for following in self.order[at : at + 1 + ahead]:
                    self._receive(following)
                if action.kind == "forward":
                    self._forward(action)
                else:
                    self._backward(action)
                if last_of[action.index] == at:
                    contexts[action.index].close()
        for transfer, _ in self._sent.values():
            transfer.wait()

    def _forward(self, action: Action) -> None:
        stage = self.stages[action.chunk]
        batch = self.micro_batches[action.index]
        entered = self._arrived(action)
        if self.work.trains:
            if entered is not None:
                entered.requires_grad_()
        elif self.parts is not None:
            self.parts.enter(action.index, len(self.micro_batches))
        last = self.links.is_last(stage)
        bound = cast(nn.Module, BoundStage(stage.module, entered))
        made = self.work.forward(bound, action.index, batch, part=not last)
        if not last:
            self._send(action, made.detach(), stage.number + 1)
        if self.work.trains:
            # Of an output only its place in the graph is kept: its memory is free once it is sent.
            self._kept[action.chunk, action.index] = _Kept(entered, made if last else get_gradient_edge(made))
            self.most_kept = max(self.most_kept, len(self._kept))

    def _backward(self, action: Action) -> None:
        stage = self.stages[action.chunk]
        grad = self._arrived(action)
        if grad is not None and (sent := self._sent.pop(Action("forward", action.chunk, action.index), None)):
            sent[0].wait()  # has ended: the next stage has used it
        kept = self._kept.pop((action.chunk, action.index))
        if self.parts is not None:  # gradients and losses are added in backward passes
            self.parts.enter(action.index, len(self.micro_batches))
        with stage.strategy.accumulate(last=action.index == len(self.micro_batches) - 1):
            self.work.backward(action.index, kept.made, grad)
        if kept.entered is not None:
            assert kept.entered.grad is not None
            self._send(action, kept.entered.grad, stage.number - 1)

    def _receive(self, action: Action) -> None:
        """Starts to receive what an action needs, if it needs something and has not started."""
        stage = self.stages[action.chunk]
        source = stage.number - 1 if action.kind == "forward" else stage.number + 1
        if action in self._received or source < 0 or (action.kind == "backward" and self.links.is_last(stage)):
            return
        shape, dtype = stage.passed(action.kind, self.micro_batches[action.index].tokens)
        into = torch.empty(shape, dtype=dtype, device=self.device)
        link = self.links.way(source, stage.number)
        started = dist.irecv(into, self.links.peer(source), **link) if into.numel() else None
        self._received[action] = into, started

    def _arrived(self, action: Action) -> Tensor | None:
        if action not in self._received:
            return None
        into, started = self._received.pop(action)
        if started is not None:
            started.wait()
        return into

    def _send(self, action: Action, tensor: Tensor, target: int) -> None:
        """Starts to send the result of an action to a stage."""
        if not tensor.numel():
            return
        tensor, source = tensor.contiguous(), self.stages[action.chunk].number
        transfer = dist.isend(tensor, self.links.peer(target), **self.links.way(source, target))
        assert transfer is not None
        self._sent[action] = transfer, tensor
        if len(self._sent) > self.most_sends:
            oldest = next(iter(self._sent))
            self._sent.pop(oldest)[0].wait()
