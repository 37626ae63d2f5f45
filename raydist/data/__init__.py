"""Tokens and their order: corpora, tokenizers, Arrow shards, the keyed permutation, batches.

Runs anywhere: in the driver (prepare), in Ray Data's tasks (shards), in each train worker (dataset, order,
batches). Plain python, numpy, pyarrow and xxhash; `tokenizers` only for BPE. Nothing here imports
torch or ray; jinja2 is imported for chat templates only.

    sources.py         the source files of a corpus, divided into blocks, in a fixed order
    documents.py       the documents of a part of a file, validated
    conversations.py   rows with messages, or with prompt and completion, checked
    chat_template.py   conversations to text, and what of it the assistant says
    tokenizers/        text to ids: one tokenizer a file
    shards.py          one block -> its shards: the pure function that is mapped
    prepare_plan.py    a request as blocks, with a key of it
    prepare.py         plan, map, commit; the index is written last
    verify.py          checks every byte of a dataset against its hashes
    index.py           a dataset's metadata
    dataset.py         a dataset, memory-mapped; its samples are windows of tokens
    order.py           the order of an epoch: a keyed permutation without state
    batches.py         global batches, and a rank's share
    loader.py          the thread that prefetches them
    sequences.py       documents as samples (data.batching)
    micro_batches.py   which of them are computed together, in which shape and where
    token_batches.py   global batches of a number of tokens
    padding.py         counts their padding
    samples.py         the samples and global batches of a job
    skipped_batches.py the global batches that are left out of training

Tested in tests/data:
- the same input gives the same bytes, whatever the parallelism and however often preparation was interrupted;
- train and eval have no document in common;
- of conversations only what the assistant says is a target, with the tokens of `transformers`;
- every sample of an epoch is trained exactly once, with any number of ranks; the tail is masked, not dropped;
- the samples of step s are a pure function of (seed, fingerprint, global batch), at the same cost for any s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from raydist.data.prepare import Progress


def open_or_prepare(wanted: Any, storage_uri: str, progress: Callable[[Progress], None] | None = None) -> str:
    """The path or URI of the dataset for a job's `data`; see `raydist.data.prepare.open_or_prepare`."""
    from raydist.data import prepare

    return prepare.open_or_prepare(wanted, storage_uri, progress)
