"""Tokens and their order: corpora, tokenizers, Arrow shards, the keyed permutation, batches.

Runs anywhere: in the driver (prepare), in Ray Data's tasks (shards), in each train worker (dataset, order,
batches). Plain python, numpy, pyarrow and xxhash; `tokenizers` only where a BPE is used. Nothing here imports
torch or ray.

    sources.py     where text comes from: files cut into blocks, in a fixed order
    documents.py   the documents of a piece of a file, checked
    tokenizers.py  text to ids: bytes, BPE
    shards.py      one block -> its shards: the pure function that is mapped
    plan.py        what was asked, as blocks, with a key of it
    prepare.py     plan, map, commit; the index comes last
    verify.py      every byte of a dataset against its hashes
    index.py       what a dataset says of itself
    dataset.py     a dataset, memory-mapped; windows of it are samples
    order.py       the order of an epoch: a keyed permutation with no state
    batches.py     global batches, a rank's share, the thread that makes them ahead of time

What holds here, and is tested in tests/data:
- the same input gives the same bytes, whatever the parallelism and however often it was cut short;
- train and eval share no document;
- every sample of an epoch is trained exactly once, at any number of ranks; the tail is masked, not dropped;
- the samples of step s are a pure function of (seed, fingerprint, global batch), at the same cost for any s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from raydist.data.prepare import Progress


def open_or_prepare(wanted: Any, storage_uri: str, progress: Callable[[Progress], None] | None = None) -> str:
    """The path or URI of the dataset that a job's `data` asks for; see
    `raydist.data.prepare.open_or_prepare`."""
    from raydist.data import prepare

    return prepare.open_or_prepare(wanted, storage_uri, progress)
