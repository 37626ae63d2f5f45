"""How much of the micro-batches of a job with `data.batching` is padding, counted from the first global batches of the order.

Runs anywhere: numpy and pyarrow, no torch. Reads the lengths of documents, not their tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raydist.data.batches import Batches, Cursor
from raydist.data.sequences import Sequences


@dataclass(slots=True)
class OfLength:
    """Micro-batches of one padded length: their number, their sequences, the tokens of these, and with padding."""

    micro_batches: int = 0
    sequences: int = 0
    tokens: int = 0
    padded: int = 0


@dataclass(slots=True)
class Padding:
    """Of `steps` global batches on `replicas` replicas.

    `by_length`: by the padded length of micro-batches, ascending. `empty`: micro-batches without a sequence. `waits`: the share of
    the replicas' padded tokens that the fullest replica of each step has beyond the mean.
    """

    steps: int
    replicas: int
    by_length: dict[int, OfLength] = field(default_factory=dict)
    empty: int = 0
    waits: float = 0.0

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(part.tokens for part in self.by_length.values())

    @property
    def padded(self) -> int:
        """Of all micro-batches."""
        return sum(part.padded for part in self.by_length.values())

    @property
    def share(self) -> float:
        """The padding of all tokens that are computed."""
        return 1 - self.tokens / self.padded


def padding(samples: Sequences, batches: Batches, replicas: int, steps: int) -> Padding:
    """Counts the first `steps` global batches, at most one epoch."""
    made = Padding(min(steps, batches.steps_per_epoch), replicas)
    cursor, fullest, shapes = Cursor(), 0, samples.shapes
    for _ in range(made.steps):
        ids = batches.ids(cursor)
        lengths, loads = samples.lengths(ids), []
        for rank in range(replicas):
            load = 0
            for part in samples.divide(ids, rank, replicas):
                rows, length = shapes.shape(lengths[part])
                load += rows * length
                if not len(part):
                    made.empty += 1
                of = made.by_length.setdefault(length, OfLength())
                of.micro_batches += 1
                of.sequences += len(part)
                of.tokens += int(lengths[part].sum())
                of.padded += rows * length
            loads.append(load)
        fullest += max(loads)
        cursor = batches.after(cursor)
    made.by_length = dict(sorted(made.by_length.items()))
    made.waits = 1 - made.padded / (fullest * replicas)
    return made
