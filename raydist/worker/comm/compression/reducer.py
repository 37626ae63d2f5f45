"""The sum of gradients over the ranks of a group, compressed: an all-reduce for ddp and hsdp, a reduce-scatter for the others.

Runs in: each train worker. Torch, never ray.

    encode    gradient + what is left -> rows for the ranks, and what is left of it now          lane 1
    exchange  each rank gets its row from all ranks
    add       decoded rows, in fp32, in the order of the ranks: this rank's part of the sum      lane 2
    gather    (all-reduce) the part is encoded again, and all ranks get all parts
    decode    the sum, from the same bytes on every rank: replicas stay equal to the bit         lane 3

An all-reduce of two ranks has no second encoding: each sends all of its gradient to the other, which is as many bytes in half as
many messages, and both decode and add the same two rows.

    encode    gradient + what is left -> one row, which both ranks get                           lane 1
    decode    the sum of both rows, in the order of the ranks                                    lane 3

What the second encoding loses is part of the sum; the rank that encodes it keeps it with what is left of its own gradient. So after
every step the sums that were sent, and what is left on all ranks together, are the sum of all gradients.

Each lane takes pieces in the order of the calls, which is the same on all ranks, and has a group of its own, so that no exchange
waits for another lane's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from raydist.errors import UserError
from raydist.extension_plans import sides
from raydist.spec import CommSpec
from raydist.worker.comm import compressors, gloo_p2p
from raydist.worker.comm.compression import piece as pieces
from raydist.worker.comm.compression.lane import Lane
from raydist.worker.comm.compression.piece import Piece
from raydist.worker.comm.compressors import Rows, Sums
from raydist.worker.comm.groups import another
from raydist.worker.comm.json_gather import gather_json
from raydist.worker.metrics import collective_counters


@dataclass(slots=True)
class Sent:
    """What this rank has sent of one piece. Squares are of norms: `given` of what was encoded, `lost` of what was lost.

    `nbytes`: that went to other ranks; `plain`: what a ring would have sent in fp32.
    """

    plain: float
    given: Tensor
    lost: Tensor
    nbytes: float = 0.0


class Reducer:
    """Sums pieces over `group`. All ranks of it make one, and call it with the same pieces in the same order.

    `factor`: what the strategy multiplies a rank's gradient by, beside the loss scale, so that gradients are divided by it.
    `aside`: encoding and exchange run beside the caller; False: a call returns with the sum. `part`: what the ranks of the group
    have of each parameter, if they have a part; "" for all.
    """

    def __init__(
        self,
        spec: CommSpec,
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        factor: float,
        aside: bool,
        part: str = "",
    ) -> None:
        self._compressor = compressors.build(spec.compress, spec.options)
        self.feedback, self.factor, self.part = spec.feedback, factor, part
        self.spec, self.device = spec, device
        self.ranks = dist.get_process_group_ranks(group)
        """Of the world, in the order of the group; `me`: this one."""
        self.world, self._rank = group.size(), group.rank()
        self.me = self.ranks[self._rank]
        self.pieces: list[Piece] = []
        self.active = False
        """Whether a step has begun: passes before it are no training, and the strategy sums them itself."""
        self.sent: list[Sent] = []
        """Of this step, a line for each piece that has arrived."""
        self._scale = 1.0
        self._rooms: dict[str, Tensor] = {}
        self._put_at = self._done_at = 0.0
        on_cuda = device.type == "cuda" and aside
        stream = torch.cuda.Stream(device) if on_cuda else None  # type: ignore[no-untyped-call]
        self._lanes = [Lane(f"compress-{name}", stream, aside) for name in ("encode", "add", "decode")]
        first = another(self.ranks, alone=True)
        self._groups = [first, another(self.ranks, alone=True) if gloo_p2p.direct(group) else first]

    def flat(self, shapes: Mapping[str, torch.Size]) -> Piece:
        """A piece for `all_reduce`: whole parameters, one after another."""
        return self._with_state(pieces.flat(shapes, self.world, self._compressor))

    def packed(self, shapes: Mapping[str, torch.Size]) -> Piece:
        """A piece for `reduce_scatter`: parameters cut by rows like torch.chunk, the parts for one rank together."""
        return self._with_state(pieces.packed(shapes, self.world, self._compressor))

    def _with_state(self, piece: Piece) -> Piece:
        if isinstance(self._compressor, Sums):
            for name, shape in piece.shapes.items():
                if len(shape) > 1 and (made := self._compressor.state(name, *sides(shape))) is not None:
                    piece.kept_state[name] = made.to(self.device)
        if self.feedback:
            piece.kept = torch.zeros(self.world, piece.size, device=self.device)
            piece.made = torch.zeros_like(piece.kept)
        self.pieces.append(piece)
        return piece

    def refuse(self) -> None:
        """Raises UserError if the compressor can compress none of the parameters of the pieces."""
        compressors.refuse(self._compressor, {n: shape for piece in self.pieces for n, shape in piece.shapes.items()})

    def described(self) -> list[object]:
        """What all ranks of the group must have alike: compressor, names and encoded sizes."""
        return [
            self.part,
            [self.spec.compress, self.feedback, *(f"{k}={v}" for k, v in sorted(self.spec.options.items()))],
            [
                [
                    [*piece.shapes],
                    self._compressor.row_bytes(piece.size)
                    if isinstance(self._compressor, Rows)
                    else [piece.size, *(tensor.numel() for tensor in piece.kept_state.values())],
                ]
                for piece in self.pieces
            ],
        ]

    def room(self, name: str, rows: int, size: int) -> Tensor:
        """[rows, size], with any numbers in it, for a task of one lane at a time: what a piece need not keep is not allocated for
        each, and is in the processor's cache."""
        numel = rows * size
        if name not in self._rooms or self._rooms[name].numel() < numel:
            self._rooms[name] = torch.empty(numel, device=self.device)
        return self._rooms[name][:numel].view(rows, size)

    # --- a step

    def begin(self, scale: float) -> None:
        """A step begins, or begins again: what the last one left counts only if it was committed. `scale`: the loss scale."""
        self.active, self._scale = True, scale
        self.sent = []
        for piece in self.pieces:
            piece.used = False

    def commit(self) -> None:
        """The update was applied: what this step left is what the next one adds."""
        for piece in self.pieces:
            if piece.used:
                piece.kept, piece.made = piece.made, piece.kept
                piece.kept_state = piece.made_state
                piece.used = False

    def left(self) -> Tensor:
        """The square of the norm of what this step leaves on this rank."""
        left = (p.made if p.used else p.kept for p in self.pieces)
        norms = [torch.linalg.vector_norm(tensor) for tensor in left if tensor is not None]
        return torch.stack(norms).square().sum() if norms else torch.zeros((), device=self.device)

    def finish(self) -> None:
        """After the last backward of a step, when all has arrived: counts the time in which the caller had nothing left to do."""
        if self.device.type == "cpu":
            kind = "all_reduce" if isinstance(self._compressor, Sums) else "all_to_all"
            collective_counters.expose(kind, max(0.0, self._done_at - self._put_at))

    def all_reduce(self, piece: Piece, gradients: Tensor) -> Future[Tensor]:
        """`gradients` of a flat piece become their sum over the ranks, divided by `factor`. Leave them alone until it is done."""
        return self._start(piece, gradients, gradients, gather=True)

    def reduce_scatter(self, piece: Piece, gradients: Tensor, mine: Tensor) -> Future[Tensor]:
        """This rank's row, [row], of the sum of `gradients`, [W, row], into `mine`, divided by `factor`."""
        return self._start(piece, gradients, mine, gather=False)

    def _start(self, piece: Piece, gradients: Tensor, into: Tensor, gather: bool) -> Future[Tensor]:
        on_cuda = self.device.type == "cuda"
        done: Future[Tensor] = Future(devices=[self.device]) if on_cuda else Future()
        if (before := piece.pending) is not None:  # its buffers are in use: another micro-batch has sent it
            before.wait()
        piece.pending = done
        call = _Call(self, piece, gradients, into, gather, done)
        self._put_at = time.perf_counter()
        self._lanes[0].put(call.guarded(call.sums if isinstance(self._compressor, Sums) else call.encode))
        return done


class _Call:
    """One piece on its way."""

    def __init__(
        self, owner: Reducer, piece: Piece, gradients: Tensor, into: Tensor, gather: bool, done: Future[Tensor]
    ) -> None:
        self._owner, self._piece, self._into, self._gather, self._done = owner, piece, into, gather, done
        self._pair = gather and owner.world == 2
        self._gradients = piece.like(gradients)
        nothing = torch.zeros((), device=owner.device)
        plain = (2.0 if gather else 1.0) * 4 * piece.numel * (owner.world - 1) / owner.world
        self._sent = Sent(plain, nothing, nothing)
        self._work: gloo_p2p.Work | None = None

    def guarded(self, task: Callable[[], None]) -> Callable[[], None]:
        """The same; an error, as of a lost peer, is raised where the result is waited for."""

        def run() -> None:
            try:
                with collective_counters.beside(self._owner.device):
                    task()
            except Exception as error:
                self._done.set_exception(error)  # type: ignore[arg-type]  # torch's annotation

        return run

    def _take(self) -> Tensor:
        """[W, S]: the gradient as this rank's contribution to that of a full batch's mean loss, plus what is left."""
        owner, piece = self._owner, self._piece
        factor = 1.0 / (owner._scale * owner.factor)
        if piece.made is None:
            values = owner.room("values", owner.world, piece.size)
            torch.mul(self._gradients, factor, out=piece.body(values))
        elif piece.used:
            values = piece.made
            piece.body(values).add_(self._gradients, alpha=factor)
        else:
            assert piece.kept is not None
            values = piece.made
            torch.add(piece.body(piece.kept), self._gradients, alpha=factor, out=piece.body(values))
        piece.clear_padding(values)
        piece.used = piece.made is not None
        self._sent.given = torch.linalg.vector_norm(values).square()
        return values

    def _finish(self, of_sum: Tensor | None) -> None:
        """`of_sum`: the sum of the contributions, in the shape of `into`; None: it is there."""
        if of_sum is not None:
            torch.mul(of_sum, self._owner._scale, out=self._into)
        self._owner.sent.append(self._sent)
        self._owner._done_at = time.perf_counter()
        self._piece.pending = None
        self._done.set_result(self._into)

    # --- a compressor that adds up by itself

    def sums(self) -> None:
        """The compressor's own reduction, of all rows."""
        owner, piece = self._owner, self._piece
        compressor = owner._compressor
        assert isinstance(compressor, Sums)
        state = piece.made_state if piece.used else piece.kept_state
        values = self._take()
        result = owner.room("result", owner.world, piece.size)

        def add_up(flat: Tensor) -> None:
            begun = time.perf_counter()
            dist.all_reduce(flat, group=owner._groups[0])
            self._sent.nbytes += 2 * flat.nbytes * (owner.world - 1) / owner.world
            if owner.device.type == "cpu":
                collective_counters.count("all_reduce", flat.nbytes, owner.world, time.perf_counter() - begun, 0.0)

        piece.made_state = compressor.reduce(*piece.split(values, result), state, add_up)
        piece.used = True
        self._sent.lost = torch.linalg.vector_norm(values).square()
        whole = piece.body(result)
        self._finish(whole if self._gather else whole[owner._rank])

    # --- a compressor of rows

    def encode(self) -> None:
        """Rows for all ranks are encoded and sent; of two that gather the sum, one row for both."""
        owner, piece, compressor = self._owner, self._piece, self._owner._compressor
        assert isinstance(compressor, Rows)
        values = self._take()
        if self._pair:
            self._encode_own(values.view(1, -1))
            self._gather_rows()
            return
        each = compressor.row_bytes(piece.size)
        sent, came = (piece.buffer(name, (owner.world, each), owner.device) for name in ("sent", "came"))
        compressor.encode(values, sent)
        self._sent.lost = torch.linalg.vector_norm(values).square()
        self._sent.nbytes += each * (owner.world - 1)
        self._work = gloo_p2p.all_to_all(came, sent, owner._groups[0])
        owner._lanes[1].put(self.guarded(self.add))

    def add(self) -> None:
        """This rank's row of the sum; for an all-reduce it is encoded again, and gathered."""
        owner, piece, compressor = self._owner, self._piece, self._owner._compressor
        assert isinstance(compressor, Rows)
        assert self._work is not None
        self._work.wait()
        total = owner.room("total", 1, piece.size)
        came = piece.room["came"]
        compressor.decode(came[:1], total)
        compressor.add(came[1:], total[0])
        if not self._gather:
            self._finish(total[0, : piece.row])
            return
        self._encode_own(total)
        if piece.made is not None:
            piece.made[owner._rank].add_(total[0])
        self._gather_rows()

    def _encode_own(self, values: Tensor) -> None:
        """`values`, [1, S] or all of a pair's, into this rank's row of what is gathered. They become what was lost."""
        owner, compressor = self._owner, self._owner._compressor
        assert isinstance(compressor, Rows)
        shape = owner.world, compressor.row_bytes(values.shape[1])
        gathered = self._piece.buffer("gathered", shape, owner.device)
        compressor.encode(values, gathered[owner._rank : owner._rank + 1])
        lost = torch.linalg.vector_norm(values).square()
        # A pair has lost nothing before. On CUDA that zero is of another stream, which may use its memory again.
        self._sent.lost = lost if self._pair else self._sent.lost + lost

    def _gather_rows(self) -> None:
        owner, gathered = self._owner, self._piece.room["gathered"]
        self._sent.nbytes += gathered.shape[1] * (owner.world - 1)
        self._work = gloo_p2p.all_gather(gathered.view(-1), gathered[owner._rank], owner._groups[1])
        owner._lanes[2].put(self.guarded(self.decode))

    def decode(self) -> None:
        """The sum, from what all ranks have sent."""
        owner, piece, compressor = self._owner, self._piece, self._owner._compressor
        assert isinstance(compressor, Rows)
        assert self._work is not None
        self._work.wait()
        gathered = piece.room["gathered"]
        in_place = owner._scale == 1.0 and self._into.numel() == owner.world * piece.size  # no padding
        values = self._into.view(owner.world, -1) if in_place else owner.room("result", owner.world, piece.size)
        if self._pair:
            compressor.decode(gathered[:1], values.view(1, -1))
            compressor.add(gathered[1:], values.view(-1))
        else:
            compressor.decode(gathered, values)
        self._finish(None if in_place else piece.body(values))


def agreed(own: Sequence[Sequence[Any]], control: dist.ProcessGroup | None) -> list[list[Any]]:
    """`own` of every rank: (ranks of a group, what this rank would send there) for each of its groups, as plain values. Raises
    UserError, on every rank, if the ranks of a group would send different things. A collective of all ranks."""
    every = gather_json([[[*ranks], sent] for ranks, sent in own], control)
    for peers in {tuple(ranks) for of_rank in every for ranks, _ in of_rank}:
        those = [[sent for ranks, sent in every[peer] if ranks == [*peers]] for peer in peers]
        odd = [rank for rank, theirs in zip(peers, those, strict=True) if theirs != those[0]]
        if odd:
            raise UserError(
                f"comm.compress: rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} would send other gradients than rank "
                f"{peers[0]}",
                "install the same version of raydist, and of the compressor if it is your own, on every node",
            )
    return every
