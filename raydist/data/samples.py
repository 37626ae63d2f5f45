"""The samples and global batches of a job: windows of tokens, or with `data.batching` documents.

Runs in the driver and in each train worker: numpy and pyarrow, no torch. Both sides get the same from the same job and dataset.
"""

from __future__ import annotations

from raydist.data.batches import Batches, Divide, equal_parts
from raydist.data.dataset import TokenDataset, Windows
from raydist.data.micro_batches import Shapes, few_lengths
from raydist.data.sequences import Sequences
from raydist.data.token_batches import TokenBatches
from raydist.errors import DataError
from raydist.spec import JobSpec


def training_samples(spec: JobSpec, dataset: TokenDataset) -> Windows | Sequences:
    """The samples of the train split. Raises DataError."""
    batching, split = spec.data.batching, dataset.split("train")
    if batching is None:
        return Windows(split, spec.model.context)
    try:
        made = Sequences(split, spec.longest, batching.longer)
    except DataError as error:
        raise DataError(f"data.batching: {error.message}", error.hint) from None
    if not len(made):
        raise DataError(
            f"data.batching: {dataset.uri}: the train split has no documents",
            "add documents, or hold fewer of them out",
        )
    multiple, count = spec.row_multiple, spec.few_lengths
    lengths = few_lengths(made.histogram, count, multiple) if count is not None else ()
    made.shapes = Shapes(batching.max_tokens, spec.longest, batching.max, multiple, lengths)
    return made


def held_out_samples(spec: JobSpec, dataset: TokenDataset, train: Windows | Sequences) -> Windows | Sequences:
    """The samples of the eval split, in the shapes of those of the train split. Raises DataError, also if there are none."""
    split = dataset.split("eval")
    made: Windows | Sequences
    if isinstance(train, Windows):
        made = Windows(split, train.context)
    else:
        assert spec.data.batching is not None
        made = Sequences(split, train.longest, spec.data.batching.longer, train.shapes)
    if not len(made):
        raise DataError(
            f"{dataset.uri}: its {dataset.index.eval.documents} held-out documents make no sample to evaluate",
            "whole documents are held out, and never the only one: give more of them, or a larger data.eval_fraction; eval.every: "
            "null trains without evaluations",
        )
    return made


def batches_of(spec: JobSpec, samples: Windows | Sequences, fingerprint: str) -> Batches:
    """The global batches of a job. Raises DataError if there are no samples."""
    batching, seed = spec.data.batching, spec.train.seed
    if isinstance(samples, Windows) or batching is None or batching.global_tokens is None:
        return Batches(len(samples), spec.train.global_batch, seed, fingerprint)
    return TokenBatches(len(samples), samples.lengths, samples.tokens, batching.global_tokens, seed, fingerprint)


def divide_of(spec: JobSpec, samples: Windows | Sequences) -> Divide:
    """How a global batch becomes the micro-batches of each rank."""
    return equal_parts(spec.train.micro_batch) if isinstance(samples, Windows) else samples.divide


def full_tokens(batches: Batches, samples: Windows | Sequences) -> int:
    """Tokens of a full global batch; of documents on average. A constant of the run."""
    if isinstance(samples, Windows):
        return batches.global_batch * samples.context
    return max(1, round(batches.global_batch * samples.tokens / len(samples)))
