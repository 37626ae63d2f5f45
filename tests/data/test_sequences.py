"""Documents as samples, and global batches that are counted in tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.data import index as indexes
from raydist.data.batches import MASKED, Batches, Cursor, samples_hash
from raydist.data.dataset import TokenDataset
from raydist.data.micro_batches import Shapes
from raydist.data.prepare import prepare
from raydist.data.samples import training_samples
from raydist.data.sequences import Longer, Sequences
from raydist.data.token_batches import TokenBatches
from raydist.errors import DataError
from raydist.spec import JobSpec

END = 256
TEXTS = ["a", "bc" * 4, "d" * 31, "ef" * 16, "g" * 40, "hi" * 50, "j" * 33, "k" * 97]


def write(folder: Path, texts: list[str] = TEXTS, **more: Any) -> TokenDataset:
    """A byte dataset with these documents, in shards of 40 tokens, so that documents span several."""
    folder.mkdir(exist_ok=True)
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
    (folder / "all.jsonl").write_text(lines)
    prepare([str(folder / "all.jsonl")], str(folder / "tokens"), **{"eval_fraction": 0.0, "shard_tokens": 40, **more})
    return TokenDataset(str(folder / "tokens"))


def rows(sequences: Sequences, ids: list[int]) -> list[tuple[list[int], list[int]]]:
    """(tokens, targets) of each sample, without padding."""
    tokens, targets, documents = sequences.batch(np.array(ids))
    assert documents is None
    assert tokens.shape == targets.shape
    lengths = sequences.lengths(np.array(ids))
    assert (tokens[np.arange(tokens.shape[1]) >= lengths[:, None]] == END).all()
    assert (targets[np.arange(tokens.shape[1]) >= lengths[:, None]] == MASKED).all()
    return [(t[:n].tolist(), x[:n].tolist()) for t, x, n in zip(tokens, targets, lengths, strict=True)]


def test_each_document_is_a_row(tmp_path: Path) -> None:
    """A row has a document's tokens, and their successors as targets, the end token the last one. Shards do not matter."""
    sequences = Sequences(write(tmp_path).split("train"), 200)
    order = sequences.lengths(np.arange(len(sequences)))
    assert len(sequences) == sequences.documents == len(TEXTS)
    assert sequences.tokens == sum(map(len, TEXTS))
    assert sorted(order) == sorted(map(len, TEXTS))
    for tokens, targets in rows(sequences, list(range(len(TEXTS)))):
        assert bytes(tokens).decode() in TEXTS
        assert targets == [*tokens[1:], END]
    assert np.flatnonzero(sequences.histogram).tolist() == sorted(set(map(len, TEXTS)))
    assert sequences.batch(np.array([], dtype=np.int64))[1].tolist() == [[MASKED]]
    with pytest.raises(IndexError):
        sequences.batch(np.array([len(TEXTS)]))


@pytest.mark.parametrize("longest", [1, 7, 32, 33, 100])
def test_long_documents_are_split(tmp_path: Path, longest: int) -> None:
    """Each token of each document is a target once; pieces of a document have nearly the same length, none above the limit."""
    dataset = write(tmp_path)
    sequences = Sequences(dataset.split("train"), longest, "split")
    lengths = sequences.lengths(np.arange(len(sequences)))
    assert lengths.max() <= longest
    assert len(sequences) == sum(-(-len(text) // longest) for text in TEXTS)
    assert np.array_equal(np.bincount(lengths, minlength=longest + 1), sequences.histogram)
    trained = sorted(target for _, targets in rows(sequences, list(range(len(sequences)))) for target in targets)
    whole = Sequences(dataset.split("train"), 200)
    assert trained == sorted(target for _, targets in rows(whole, list(range(len(TEXTS)))) for target in targets)
    assert sequences.lengths(sequences.example(3)).max() == lengths.max()


def test_long_documents_are_cut_or_refused(tmp_path: Path) -> None:
    """A cut document has its first tokens, and the next one as the last target; the notes count what is left out. Or DataError."""
    dataset = write(tmp_path)
    cut = Sequences(dataset.split("train"), 32, "cut")
    assert len(cut) == len(TEXTS)
    assert cut.left_out == sum(max(len(t) - 32, 0) for t in TEXTS)
    long = [(t, x) for t, x in rows(cut, list(range(len(cut)))) if len(t) == 32 and x[-1] != END]
    assert len(long) == cut.too_long == 4
    assert all(t[1:] == x[:-1] for t, x in long)
    assert cut.notes() == [
        "data.batching.longer: 4 of the 8 documents are longer than 32 tokens, and are cut: 142 of their tokens are not trained"
    ]
    assert "are split into 12 sequences" in Sequences(dataset.split("train"), 32).notes()[0]
    job = {"data": {"path": "x", "batching": {"max_tokens": 32, "longer": "error"}}, "train": {"steps": 1}}
    message = "data.batching: 4 of the 8 documents of the train split have more than 32 tokens; the first is document"
    with pytest.raises(DataError, match=message) as caught:
        training_samples(JobSpec.model_validate(job), dataset)
    assert caught.value.exit_code == 2
    assert Sequences(dataset.split("train"), 100, "error").notes() == []


def test_the_ends_are_of_the_dataset(tmp_path: Path) -> None:
    """The same ends from any blocks and shards, checked by `verify` as the other files, and read through a cache from a URI; a
    dataset of an older version has none, and says so."""
    from raydist.data.verify import verify

    one = write(tmp_path / "one")
    several = write(tmp_path / "several", block_bytes=60)
    for dataset in one, several:
        split = dataset.split("train")
        everything = split.read(0, len(split))
        assert split.ends().tolist() == np.flatnonzero(everything == END).tolist()
    assert verify(one.uri) == []
    raw = bytearray((tmp_path / "one" / "tokens" / "train-ends.bin").read_bytes())
    raw[0] ^= 1
    (tmp_path / "one" / "tokens" / "train-ends.bin").write_bytes(raw)
    assert [damage.file for damage in verify(one.uri)] == ["train-ends.bin"]
    old = several.index.to_dict()
    del old["train"]["ends"], old["eval"]["ends"]
    again = indexes.DatasetIndex.from_dict(old)
    assert again.to_dict() == old
    with pytest.raises(DataError, match="the ends of its documents are not stored"):
        type(several.split("train"))(several.storage, again, "train").ends()


def test_an_interrupted_preparation_has_all_ends(tmp_path: Path) -> None:
    """A preparation that is repeated after a crash between two blocks gives the same files as one that was not interrupted."""
    from raydist.data import shards

    class Crash(Exception):
        pass

    def crashes(make: Any, blocks: Any) -> Any:
        yield make(blocks[0])
        raise Crash

    write(tmp_path / "whole", block_bytes=60)
    with pytest.raises(Crash):
        write(tmp_path / "crashed", block_bytes=60, map_files=crashes)
    assert (tmp_path / "crashed" / "tokens" / shards.ends_file(0)).exists()
    write(tmp_path / "crashed", block_bytes=60)
    files = sorted(p.name for p in (tmp_path / "whole" / "tokens").iterdir())
    assert "train-ends.bin" in files
    assert files == sorted(p.name for p in (tmp_path / "crashed" / "tokens").iterdir())
    for name in files:
        if name != "index.json":  # has the path of the source
            whole, crashed = (tmp_path / n / "tokens" / name for n in ("whole", "crashed"))
            assert whole.read_bytes() == crashed.read_bytes()


def token_batches(lengths: np.ndarray, size: int, seed: int) -> TokenBatches:
    return TokenBatches(len(lengths), lambda ids: lengths[ids], int(lengths.sum()), size, seed, "f")


@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=200).map(np.array),
    more=st.integers(0, 100),
    seed=st.integers(0, 9),
    resume=st.integers(0, 300),
)
@settings(max_examples=200)
def test_batches_of_tokens(lengths: np.ndarray, more: int, seed: int, resume: int) -> None:
    """Each sample once an epoch, in the order of batches of sequences; exactly the announced number of steps, none empty; the
    tokens up to any batch are those asked for, less a part of one sample; a stored cursor alone is enough to continue."""
    size = int(lengths.max()) + more
    batches, cursor = token_batches(lengths, size, seed), Cursor()
    plain = Batches(len(lengths), 7, seed, "f")
    for epoch in range(2):
        trained: list[int] = []
        tokens = 0
        for step in range(batches.steps_per_epoch):
            assert cursor.epoch == epoch
            assert batches.number(cursor) == epoch * batches.steps_per_epoch + step + 1
            ids = batches.ids(cursor)
            assert len(ids)
            trained += ids.tolist()
            tokens += int(lengths[ids].sum())
            assert 0 <= min((step + 1) * size, int(lengths.sum())) - tokens < lengths.max()
            if step == resume % batches.steps_per_epoch:
                fresh = token_batches(lengths, size, seed)
                stored = Cursor.from_dict(cursor.to_dict())
                assert samples_hash(fresh.ids(stored)) == samples_hash(ids)
                assert fresh.after(stored) == batches.after(cursor)
                assert fresh.at_step(epoch * batches.steps_per_epoch + step) == cursor
            cursor = batches.after(cursor)
        assert trained == plain.order(epoch)(np.arange(len(lengths))).tolist()
    assert cursor == Cursor(2)


def test_a_batch_is_found_without_the_epoch_before_it() -> None:
    """The batch after 10^11 samples is found from the cursor alone."""
    batches = TokenBatches(10**12, lambda ids: ids % 9 + 1, 5 * 10**12, 1000, 0, "f")
    at = Cursor(3, 10**11, 5 * 10**11 + 17)
    ids = batches.ids(at)
    assert batches.after(at) == Cursor(3, 10**11 + len(ids), at.tokens + int((ids % 9 + 1).sum()))
    assert 1000 - 9 <= batches.after(at).tokens - 5 * 10**11 <= 1000


@given(
    seed=st.integers(0, 99),
    worlds=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    longer=st.sampled_from(["split", "cut"]),
)
@settings(max_examples=60)
def test_ranks_together_have_the_batch(documents: TokenDataset, seed: int, worlds: list[int], longer: Longer) -> None:
    """Over an epoch with another number of ranks at every step, all ranks together train each sample once, and the samples of a
    step are those of one rank."""
    sequences = Sequences(documents.split("train"), 24, longer, Shapes(64, 24))
    batches = TokenBatches(len(sequences), sequences.lengths, sequences.tokens, 100, seed, "f")
    cursor, trained = Cursor(), []
    for step in range(batches.steps_per_epoch):
        ids, world = batches.ids(cursor), worlds[step % len(worlds)]
        together = [int(i) for rank in range(world) for part in sequences.divide(ids, rank, world) for i in ids[part]]
        assert sorted(together) == sorted(ids.tolist())
        trained += together
        cursor = batches.after(cursor)
    assert sorted(trained) == list(range(len(sequences)))


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> TokenDataset:
    """The documents of TEXTS."""
    return write(tmp_path_factory.mktemp("documents"))
