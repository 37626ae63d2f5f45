"""Text -> a dataset of token shards: planned in blocks, mapped by the caller's function, committed by writing the index.

Runs in the preparing process; blocks may be made elsewhere (`map_files`; raydist/cluster/data_prepare.py uses
Ray Data). numpy and pyarrow; must not import torch or ray.

The same input gives the same bytes, whatever the parallelism: the blocks depend on names and sizes only, and a block's
shards on the block. An interrupted run can be continued: the journal (DATASET/.prepare, removed at the end)
lists the finished blocks. A hash of each document's content assigns it to train or eval, so that
equal documents are always in the same split.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import xxhash

from raydist import registry, remote_filesystem
from raydist.data import index as indexes
from raydist.data import shards, tokenizers
from raydist.data.chat_template import ChatFormat, Rendered, chat_format
from raydist.data.index import (
    FILE_NAME,
    INDEX,
    SPLITS,
    TOKENIZER,
    DatasetIndex,
    Ends,
    Shard,
    Split,
    SplitIndex,
    TokenizerIndex,
)
from raydist.data.locks import locked
from raydist.data.prepare_plan import SHARD_TOKENS, Plan, as_json, hash_of, plan_of, request_key
from raydist.data.shards import JOURNAL, Job, Made
from raydist.data.sources import Block
from raydist.errors import DataError, StorageError
from raydist.redact import redact
from raydist.sinks import write_whole
from raydist.storage import NO_FOLDER, Storage

_BPE_SAMPLE = 256 << 20
_BPE_BLOCKS = 256
_ALL = 1 << 64
_COPY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of the preparation. `phase`: "tokenizer" (a BPE is trained) or "tokens"; bytes are those of the sources."""

    phase: str
    bytes_done: int
    bytes_total: int
    documents: int
    tokens: int


MapFiles = Callable[[Callable[[Block], Made], Sequence[Block]], Iterable[Made]]
"""Applies a function to blocks, anywhere, and yields the results in any order; raises the function's errors."""


def prepare(
    names: Sequence[str],
    out: str,
    tokenizer: str = "bytes",
    *,
    eval_fraction: float = 0.01,
    column: str = "text",
    chat: ChatFormat | None = None,
    progress: Callable[[Progress], None] | None = None,
    map_files: MapFiles | None = None,
    block_bytes: int | None = None,
    shard_tokens: int = SHARD_TOKENS,
) -> DatasetIndex:
    """Creates the dataset `out` (a folder's path or URI) from these sources, or finishes an interrupted one.

    `chat`: the rows are conversations, and become text like that; `column` is then not used.

    A finished dataset of the same request is returned unchanged. Raises DataError for errors in the
    input, StorageError for errors of `out`; neither leaves a folder that opens as a dataset.
    """
    plan = plan_of(names, tokenizer, column, eval_fraction, block_bytes, shard_tokens, chat)
    storage = Storage(out)
    fresh = not storage.exists()
    lock = locked(storage.local / JOURNAL / "lock") if storage.local else nullcontext()
    try:
        if (done := _finished(storage, plan)) is None:
            with lock:
                # Another process may have made it while this one waited for the lock.
                done = _finished(storage, plan)
                if done is None:
                    try:
                        done = _make(storage, plan, progress or (lambda p: None), map_files)
                    except (FileNotFoundError, StorageError):
                        # On an object store there is no lock: another process may have finished it, and deleted the journal.
                        if storage.local or (done := _finished(storage, plan)) is None:
                            raise
                storage.delete(JOURNAL)
    except StorageError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_FOLDER:
            raise DataError(f"no dataset can be made at {out}: {error.message}", "give another folder") from error
        raise StorageError(
            error.message, error.hint or "fix that; the same command then continues where it stopped"
        ) from error
    except DataError:
        _clean_up(storage, fresh)
        raise
    return done


def _finished(storage: Storage, plan: Plan) -> DatasetIndex | None:
    """The finished dataset of this request; None if there is none. Raises DataError if there is a different dataset."""
    if storage.size(INDEX) is None:
        return None
    found = indexes.read(storage)
    hint = "give another --out, or delete that folder first"
    if found.request != plan.request:
        raise DataError(f"{storage.uri} holds another dataset, of {', '.join(found.sources)}", hint)
    made = storage.fs.get_file_info(storage.path(INDEX)).mtime_ns
    newer = [f.name for f in plan.files if made and f.mtime_ns and f.mtime_ns > made]
    if newer:
        raise DataError(f"{newer[0]} was changed after {storage.uri} was prepared from it", hint)
    return found


def _make(
    storage: Storage, plan: Plan, progress: Callable[[Progress], None], map_files: MapFiles | None
) -> DatasetIndex:
    threshold = int(plan.eval_fraction * _ALL)
    while True:
        progress(
            Progress(
                "tokens" if tokenizers.vocabulary(plan.tokenizer) is None else "tokenizer",
                0,
                plan.bytes,
                0,
                0,
            )
        )
        made, tokenizer = _make_all(storage, plan, threshold, progress, map_files)
        better = _better_threshold(made, threshold)
        if better == threshold:
            return _commit(storage, plan, made, tokenizer)
        threshold = better


def _better_threshold(made: Sequence[Made], threshold: int) -> int:
    """A new threshold if the hashes left a split of a small corpus empty: it moves one distinct document there."""
    documents = {name: sum(m.part(name).documents for m in made) for name in SPLITS}
    low, high = min(m.low for m in made), max(m.high for m in made)
    if threshold and not documents["eval"] and low < high:
        return low + 1
    if documents["eval"] and not documents["train"]:
        return high if low < high else 0
    return threshold


def _make_all(
    storage: Storage,
    plan: Plan,
    threshold: int,
    progress: Callable[[Progress], None],
    map_files: MapFiles | None,
) -> tuple[list[Made], tokenizers.Tokenizer]:
    tokenizer = _tokenizer(storage, plan, threshold)
    job = Job(
        storage.full_uri, plan.tokenizer, tokenizer.to_bytes(), plan.column, threshold, plan.shard_tokens, plan.chat
    )
    done = _journal(storage, job, plan.blocks)
    left = [b for b in plan.blocks if b.number not in done]
    # A user's own source is read here: other nodes may not have its module, and it cannot be divided.
    own = [b for b in left if b.records]
    make = partial(shards.make, job)
    # So is the module of a tokenizer of the user's own.
    mapped = (map if registry.is_own(plan.tokenizer) else map_files or map)(make, [b for b in left if not b.records])

    def report() -> None:
        parts = [m.part(name) for m in done.values() for name in SPLITS]
        read = sum(b.bytes for b in plan.blocks if b.number in done)
        totals = sum(p.documents for p in parts), sum(p.tokens for p in parts)
        progress(Progress("tokens", read, plan.bytes, *totals))

    report()
    for made in chain(mapped, map(make, own)):
        done[made.block] = made
        report()
    made_all = [done[b.number] for b in plan.blocks]
    if not any(m.part(name).documents for m in made_all for name in SPLITS):
        for block in plan.blocks:
            storage.delete(shards.journal_file(block.number))
            storage.delete(shards.ends_file(block.number))
        raise DataError(
            f"source {', '.join(plan.names)} is empty: it has no documents", "give sources with text in them"
        )
    return made_all, tokenizer


def _journal(storage: Storage, job: Job, blocks: Sequence[Block]) -> dict[int, Made]:
    """The finished blocks: made from the same input, and with all their shards."""
    entries, sizes = storage.files(JOURNAL), storage.files()
    done = {}
    for block in blocks:
        name = shards.journal_file(block.number)
        if block.records or name not in entries:
            continue
        try:
            made = Made.from_json(storage.read(name))
        except (ValueError, KeyError, TypeError, FileNotFoundError):
            continue
        there = all(sizes.get(s.file) == s.bytes for n in SPLITS for s in made.part(n).shards)
        there = there and shards.ends_file(block.number) in entries
        if made.key == job.key(block) and there:
            done[block.number] = made
    return done


def _tokenizer(storage: Storage, plan: Plan, threshold: int) -> tokenizers.Tokenizer:
    """The tokenizer; a BPE is trained on the train split, once per dataset, even if preparation is interrupted."""
    if tokenizers.vocabulary(plan.tokenizer) is None:
        return tokenizers.load(plan.tokenizer)
    times = [(f.path, f.mtime_ns) for f in plan.files]
    name = f"{JOURNAL}/tokenizer-{hash_of(as_json([plan.request, threshold, times]))}.json"
    if storage.size(name) is not None:
        return tokenizers.from_bytes(plan.tokenizer, storage.read(name))
    trained = tokenizers.train(plan.tokenizer, _sample(plan, threshold))
    storage.write(name, trained.to_bytes())
    return trained


def _sample(plan: Plan, threshold: int) -> Iterator[str]:
    """Texts of the train split: all of a small corpus, else the beginnings of blocks spread over it."""
    chosen = plan.blocks[:: -(-len(plan.blocks) // _BPE_BLOCKS)]
    for block in chosen:
        taken = 0
        for document in shards.documents_of(block, plan.column, plan.chat):
            if isinstance(document, bytes | Rendered) and shards.document_hash(document) >= threshold:
                text = document.decode(errors="replace") if isinstance(document, bytes) else document.text
                yield text
                taken += len(text)
                if taken >= _BPE_SAMPLE // len(chosen):
                    break


def _commit(storage: Storage, plan: Plan, made: Sequence[Made], tokenizer: tokenizers.Tokenizer) -> DatasetIndex:
    raw = tokenizer.to_bytes()
    token = TokenizerIndex(redact(plan.tokenizer), tokenizer.vocab_size, tokenizer.end, hash_of(raw))
    splits = {name: _joined(storage, made, name) for name in SPLITS}
    _check_visible(storage, [s for split in splits.values() for s in split.shards])
    histogram = np.sum([m.histogram for m in made], axis=0)
    share = histogram[histogram > 0] / max(int(histogram.sum()), 1)
    index = DatasetIndex(
        fingerprint=indexes.fingerprint(splits["train"], splits["eval"], token),
        dtype=str(shards.token_type(tokenizer.vocab_size)),
        tokenizer=token,
        train=splits["train"],
        eval=splits["eval"],
        unigram_nats=round(float(-(share * np.log(share)).sum()), 6) + 0.0,
        sources=plan.names,
        source_fingerprint=hash_of(as_json([m.content for m in made])),
        request=plan.request,
        eval_fraction=plan.eval_fraction,
        column=plan.column,
        chat=plan.chat,
    )
    storage.write(TOKENIZER, raw)
    storage.write(INDEX, index.to_bytes())
    _remove_leftovers(storage, {s.file for s in index.files()})
    return index


def _joined(storage: Storage, made: Sequence[Made], name: Split) -> SplitIndex:
    """A split of all blocks. Writes the ends of its documents, block by block."""
    parts = [m.part(name) for m in made]
    file, digest, before = f"{name}-ends.bin", xxhash.xxh3_128(), 0
    # All is read before the file is created: an object whose upload fails is deleted, and it may be another process's, which has
    # finished the dataset and deleted what is read here.
    place = str(storage.local or tempfile.gettempdir())
    with tempfile.SpooledTemporaryFile(_COPY_BYTES, dir=place) as whole:
        for block, part in zip(made, parts, strict=True):
            raw = storage.read(shards.ends_file(block.block))
            size = 8 * part.documents
            own = np.frombuffer(raw[:size] if name == "train" else raw[len(raw) - size :], dtype="<i8") + before
            data = own.tobytes()
            digest.update(data)
            try:
                whole.write(data)
            except OSError as error:
                raise StorageError(f"cannot write to {place}: {error}", "make room there, or set TMPDIR") from None
            before += part.tokens
        whole.seek(0)
        with storage.create(file) as sink:
            while data := whole.read(_COPY_BYTES):
                write_whole(sink, data)
    ends = Ends(file, 8 * sum(p.documents for p in parts), digest.hexdigest())
    return SplitIndex(
        sum(p.tokens for p in parts),
        sum(p.documents for p in parts),
        sum(p.bytes for p in parts),
        tuple(s for p in parts for s in p.shards),
        ends,
    )


def _check_visible(storage: Storage, wanted: Iterable[Shard]) -> None:
    """Raises StorageError if a shard written by another node is not visible here."""
    there = storage.files()
    for shard in wanted:
        if there.get(shard.file) != shard.bytes:
            raise StorageError(
                f"{storage.uri}/{shard.file} was written by a node of the cluster, but is not visible here",
                "use an --out that all nodes share: NFS, or a URI such as s3://bucket/folder",
            )


def _remove_leftovers(storage: Storage, keep: set[str]) -> None:
    """Removes the files of earlier tries: shards of other input, and unfinished files."""
    for name in storage.files():
        if FILE_NAME.fullmatch(name) and name not in keep:
            storage.delete(name)
    if storage.local is not None:
        for part in storage.local.glob(".tmp-*"):
            part.unlink(missing_ok=True)


def _clean_up(storage: Storage, fresh: bool) -> None:
    """Cleans up after an error in the input: keeps finished blocks for the next try; removes everything if there are none."""
    if storage.size(INDEX) is not None or any(n.startswith(f"{JOURNAL}/block-") for n in storage.files(JOURNAL)):
        return
    _remove_leftovers(storage, set())
    storage.delete(JOURNAL)
    if fresh and not storage.files() and not storage.folders():
        storage.delete("")


def open_or_prepare(wanted: Any, storage_uri: str, progress: Callable[[Progress], None] | None = None) -> str:
    """The dataset of a job's `data`: its path or URI, including secrets.

    `wanted` is the spec's DataSpec. A `path` must contain
    a dataset; a `source` is prepared in this process, once per storage, into STORAGE/.data/KEY. KEY depends on the
    request and on the files' sizes and times. If two drivers need it at the same time, one makes it. Raises
    DataError, StorageError.
    """
    if wanted.path is not None:
        there = Storage(wanted.path)
        try:
            indexes.read(there)
        except StorageError as error:
            hint = error.hint or remote_filesystem.remedy(wanted.path, "check the path or URI, and its read permission")
            raise DataError(f"data.path: {error.message}", hint) from error
        return there.full_uri
    if wanted.source is None:
        raise DataError(
            "data: neither source nor path is given", "data.source: python-stdlib is available on every machine"
        )
    names = [wanted.source]
    chat = None
    if wanted.format == "chat":
        chat = chat_format(wanted.chat_template, wanted.tokenizer, wanted.loss_on)
    key = request_key(names, wanted.tokenizer, wanted.column, wanted.eval_fraction, chat)
    out = Storage(storage_uri).at(f".data/{key}")
    prepare(
        names,
        out.full_uri,
        wanted.tokenizer,
        eval_fraction=wanted.eval_fraction,
        column=wanted.column,
        chat=chat,
        progress=progress,
    )
    return out.full_uri
