"""The memory of a rank of a pipeline: its actions in their order, each with the measured bytes of its stage.

Runs anywhere. Plain python: no torch, no ray. The actions are those of a run (worker/pipeline_schedule.py), and so is what is kept
between them (worker/parallel/_pipeline.py): the activations of micro-batches in flight, the buffers of the next transfers, and what
was sent, until it is known to have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raydist.planner.facts import Activations, Moment
from raydist.worker.pipeline_schedule import Action, actions, most_sends, receives_ahead

_IN_FORWARD = ("start", "forward", "loss")
_IN_BACKWARD = ("loss", "backward", "end")


@dataclass(frozen=True, slots=True)
class StageBytes:
    """One stage of a rank. `moments`: of the passes of one micro-batch, without what the other passes keep.

    `entered`: bytes of its input, 0 for the first stage. `buffers`: allocated for the whole run. `stays`: other ranks' parameters
    that stay gathered from a forward pass to the next backward pass.
    """

    passes: Activations
    moments: Sequence[Moment]
    entered: int
    buffers: int
    stays: int


def heaviest_moment(rank: int, ranks: int, micro_batches: int, stages: Sequence[StageBytes], device: str) -> Moment:
    """The moment of a step with the most bytes on `rank`, which has these stages."""
    chunks, ahead = len(stages), receives_ahead(device)
    most = most_sends(ranks, chunks)
    # By then a rank has as much in flight as it ever has.
    order = actions(rank, ranks, chunks, min(micro_batches, most + ranks))
    always = sum(stage.buffers for stage in stages)
    in_flight = [0] * chunks
    gathered = [0] * chunks
    sent: dict[Action, int] = {}
    heaviest = Moment("start", 0, 0, 0, 0)
    for at, action in enumerate(order):
        stage, forward = stages[action.chunk], action.kind == "forward"
        if not forward:
            in_flight[action.chunk] -= 1
            sent.pop(Action("forward", action.chunk, action.index), None)
        buffers = always + sum(sent.values())
        for following in order[at + 1 : at + 1 + ahead]:
            to = stages[following.chunk]
            buffers += to.entered if following.kind == "forward" else to.passes.passed_on
        kept = sum(n * s.passes.saved for n, s in zip(in_flight, stages, strict=True))
        copies = sum(n * s.passes.copied for n, s in zip(in_flight, stages, strict=True))
        others = sum(gathered) - gathered[action.chunk]
        for moment in stage.moments:
            if moment.phase in (_IN_FORWARD if forward else _IN_BACKWARD):
                found = Moment(
                    moment.phase,
                    moment.gathered + copies + others,
                    moment.in_flight + buffers,
                    moment.activations + kept,
                    moment.loss,
                )
                heaviest = max(heaviest, found, key=lambda m: m.total)
        if forward:
            in_flight[action.chunk] += 1
        gathered[action.chunk] = stage.stays if forward else 0
        if out := stage.passes.passed_on if forward else stage.entered:
            sent[action] = out
            if len(sent) > most:
                sent.pop(next(iter(sent)))
    return heaviest
