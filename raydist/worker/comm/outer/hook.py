"""Outer steps between replicas, in the steps that the schedule says: a hook of the step, and a call of the loop after each.

Runs in: each train worker. Torch, never ray. Every rank has one.

A replica's weight in a sum is its share of the tokens that all replicas have trained on since the fragment's last one. Both numbers
are known on every rank from the sums of the steps: nothing more is sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.futures import Future
from torch.profiler import record_function

from raydist.errors import UserError
from raydist.spec import CommSpec
from raydist.worker.comm import compressors
from raydist.worker.comm.compression.lane import Lane
from raydist.worker.comm.compression.reducer import agreed
from raydist.worker.comm.compressors import Rows
from raydist.worker.comm.groups import another
from raydist.worker.comm.outer.fragment import Fragment
from raydist.worker.comm.outer.schedule import Schedule
from raydist.worker.mesh import Mesh
from raydist.worker.metrics import collective_counters
from raydist.worker.parallel import ParamShard
from raydist.worker.step_hooks import Step, StepHook


@dataclass(frozen=True, slots=True)
class Flight:
    """An outer step that has started: of which fragment, and after which step its result is taken."""

    fragment: int
    arrives: int


class Outer(StepHook):
    """`mesh`: this rank's replica (`Mesh.apart`). `shards`: what this rank's optimizer updates. `total`: steps of the run.

    `local`: whether no outer step started or arrived after the last step. `last`: of the last outer step that has arrived, the
    seconds that training waited for it, and the bytes that this rank sent; None before the first one.
    Raises UserError if there are fewer parameters than fragments, or some that are not fp32, and on every rank if replicas would
    send different things. A collective of all ranks.
    """

    def __init__(self, spec: CommSpec, mesh: Mesh, shards: Mapping[str, ParamShard], total: int) -> None:
        self._spec, self.mesh = spec, mesh
        self.schedule = Schedule.of(spec, total)
        _refuse(spec, shards)
        group = another(mesh.others) if mesh.copies > 1 else None
        compressor = compressors.build(spec.compress, spec.options) if spec.rounds else None
        assert compressor is None or isinstance(compressor, Rows)
        cut = cut_evenly([shard.local.numel() for shard in shards.values()], spec.fragments)
        named = list(shards.items())
        self.fragments = [Fragment(dict(named[a:b]), spec.outer, mesh, group, compressor) for a, b in cut]
        sizes = [[[*fragment.shards], fragment.sent_bytes] for fragment in self.fragments]
        agreed([(mesh.others, [spec.compress, spec.options, sizes])], mesh.rank.control)
        device = mesh.rank.device
        self.sent = torch.zeros(
            max(fragment.sent_bytes for fragment in self.fragments), dtype=torch.uint8, device=device
        )
        """What this rank has sent for the outer step in flight."""
        self.tokens = torch.zeros(spec.fragments, 2, dtype=torch.int64)
        """[N, 2]: of each fragment, tokens of this replica and of all since its last outer step."""
        self.flight: Flight | None = None
        self._done: Future[Tensor] | None = None
        on_cuda = device.type == "cuda" and spec.delay > 0
        stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._lane = Lane("outer", stream, aside=spec.delay > 0)
        self.local = True
        self.last: tuple[float, int] | None = None
        self._waited = 0.0
        self.begin_anew()

    def begin_anew(self) -> None:
        """The outer weights are the weights that all replicas have now."""
        for fragment in self.fragments:
            fragment.begin()

    def resumed(self, has_locals: bool) -> None:
        """After a load: gathers what is not in a checkpoint, and sends again what was on its way. `has_locals`: the replica's own
        weights were loaded; else they become the outer ones. A collective."""
        for fragment in self.fragments:
            if self._spec.rounds or not has_locals:
                fragment.spread(not has_locals)
        if self.flight is not None:
            self._send(self.flight.fragment)

    @property
    def weights(self) -> dict[str, Tensor]:
        """The outer weights of each parameter, as DTensors."""
        return {name: part for fragment in self.fragments for name, part in fragment.parts(fragment.outer).items()}

    # --- a step

    def updated(self, step: Step) -> None:
        """Counts the tokens of an update."""
        self.tokens += torch.tensor([step.own_tokens, step.tokens])

    def stepped(self, step: int, before_write: Callable[[], object]) -> bool:
        """After each step, also one without an update: whether weights have changed. All ranks. `before_write` returns once no copy
        of the state is in progress."""
        arrives = self.flight is not None and step >= self.flight.arrives
        starts = self.schedule.starts(step)
        self.local = not (arrives or starts)
        if self.local:
            return False
        before_write()
        if arrives:
            self._arrive(self._spec.outer.blend)
        for n in starts:
            self._start(n, step)
            if self.schedule.arrives(step) == step:
                self._arrive(0.0)
        return arrives or self.flight is None

    def close(self) -> None:
        """Returns once nothing is on its way. At the end of an attempt: all ranks are at the same step."""
        if self._done is not None:
            self._done.wait()

    def _start(self, n: int, step: int) -> None:
        fragment = self.fragments[n]
        own, every = self.tokens[n].tolist()
        weight = own / every if every else 1.0 / self.mesh.copies
        self.tokens[n].zero_()
        begun = time.perf_counter()
        with record_function(f"outer step of fragment {n}: start"):
            fragment.put(self.sent[: fragment.sent_bytes], weight)
            self.flight = Flight(n, self.schedule.arrives(step))
            self._send(n)
        self._waited = time.perf_counter() - begun

    def _send(self, n: int) -> None:
        fragment, device = self.fragments[n], self.mesh.rank.device
        done: Future[Tensor] = Future(devices=[device]) if device.type == "cuda" else Future()

        def run() -> None:
            try:
                beside = collective_counters.beside(device)
                with beside, record_function(f"outer step of fragment {n}: exchange"):
                    done.set_result(fragment.exchange(self.sent[: fragment.sent_bytes]))
            except Exception as error:  # a lost peer: raised where it is waited for
                done.set_exception(error)  # type: ignore[arg-type]  # torch's annotation

        self._done = done
        self._lane.put(run)

    def _arrive(self, blend: float) -> None:
        assert self.flight is not None
        assert self._done is not None
        begun = time.perf_counter()
        fragment = self.fragments[self.flight.fragment]
        with record_function(f"outer step of fragment {self.flight.fragment}: arrival"):
            self._done.wait()
            fragment.take(blend)
        self.last = self._waited + time.perf_counter() - begun, fragment.nbytes
        self.flight = self._done = None


def cut_evenly(sizes: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """(first, after the last) of so many stretches of about equal total size, none of them empty."""
    found, total, done = [], sum(sizes), 0
    first = 0
    for part in range(parts):
        last = first + 1
        done += sizes[first]
        while last < len(sizes) - (parts - part - 1) and (
            part == parts - 1 or done + sizes[last] / 2 <= total * (part + 1) / parts
        ):
            done += sizes[last]
            last += 1
        found.append((first, last))
        first = last
    return found


def _refuse(spec: CommSpec, shards: Mapping[str, ParamShard]) -> None:
    if len(shards) < spec.fragments:
        raise UserError(
            f"comm.fragments: {spec.fragments}: a rank has {len(shards)} parameters",
            f"set it to {len(shards)} or less",
        )
    scalars = [name for name, shard in shards.items() if not shard.local.ndim]
    if scalars:
        raise UserError(
            f"comm.every: {', '.join(scalars[:5])}: a parameter without dimensions has no rows to share",
            "give it the shape [1], or leave comm.every out",
        )
    others = [name for name, shard in shards.items() if shard.local.dtype != torch.float32]
    if others:
        raise UserError(
            f"comm.every: {', '.join(others[:5])}: outer steps are of fp32 parameters", "leave comm.every out"
        )
