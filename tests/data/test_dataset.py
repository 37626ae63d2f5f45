"""Reading a prepared dataset: zero-copy views, windows, masks, packing, and the cache of a remote dataset."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydist.data.batches import MASKED
from raydist.data.dataset import TokenDataset, TokenSplit, Windows
from raydist.data.index import BLOCK, SplitIndex
from raydist.data.prepare import prepare
from raydist.errors import DataError
from raydist.storage import Storage


def everything(split: TokenSplit) -> np.ndarray:
    """All tokens of a split in one array."""
    return np.concatenate([split.read(i, i + 1) for i in range(len(split))]).astype(np.int64)


def remote(folder: Path) -> Storage:
    """The folder as storage that is not marked as local, like S3."""
    storage = Storage(folder)
    storage.local = None
    return storage


@pytest.fixture(scope="module")
def whole(dataset: TokenDataset) -> np.ndarray:
    """All training tokens."""
    return everything(dataset.split("train"))


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_read_crosses_shards(dataset: TokenDataset, whole: np.ndarray, data: st.DataObject) -> None:
    """Any range reads as if the shards were one array."""
    split = dataset.split("train")
    assert len(split.shards) > 5
    start = data.draw(st.integers(0, len(split)))
    stop = data.draw(st.integers(start, min(len(split), start + 3_000)))
    got = split.read(start, stop)
    assert got.dtype == np.uint16
    assert np.array_equal(got, whole[start:stop])
    with pytest.raises(IndexError):
        split.read(start, len(split) + 1)


def test_views_are_not_copies(dataset: TokenDataset) -> None:
    """Two reads of the same tokens share memory, and it is read-only."""
    split = dataset.split("train")
    first, second = split.read(10, 60), split.read(40, 90)
    assert np.shares_memory(first, second)
    assert not first.flags.writeable


def test_reading_imports_no_pandas(dataset: TokenDataset, tmp_path: Path) -> None:
    """Reading does not import pandas, which pyarrow imports by itself if it is installed: a second in every rank that starts."""
    (tmp_path / "pandas.py").write_text("raise SystemExit('somebody imports pandas')\n")
    script = "import sys; from raydist.data.dataset import TokenDataset; print(TokenDataset(sys.argv[1]).split('train').read(0, 9))"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script, dataset.uri],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == str(dataset.split("train").read(0, 9)).split()


def test_text_comes_back(dataset: TokenDataset, corpus: Path) -> None:
    """The decoded train and eval documents are the lines of the files, each once; each document ends with the end token."""
    texts = []
    for name in ("train", "eval"):
        tokens = everything(dataset.split(name))
        assert tokens[-1] == dataset.end
        for document in np.split(tokens, np.flatnonzero(tokens == dataset.end) + 1)[:-1]:
            texts.append(dataset.tokenizer.decode(document))
    assert sorted(line for t in texts for line in t.splitlines()) == sorted(
        line for p in corpus.iterdir() for line in p.read_text().splitlines()
    )
    assert len(texts) == dataset.index.train.documents + dataset.index.eval.documents


@pytest.mark.parametrize("context", [1, 7, 64, 999, 5_000])
def test_windows_cover_every_target_once(dataset: TokenDataset, whole: np.ndarray, context: int) -> None:
    """In the order of ids, tokens and unmasked targets are the split, shifted by one; a window may cross shards."""
    split = dataset.split("train")
    windows = Windows(split, context)
    assert len(windows) == -(-(len(split) - 1) // context)
    tokens, targets, documents = windows.batch(np.arange(len(windows)))
    assert documents is None
    assert tokens.dtype == targets.dtype == np.int64
    assert tokens.shape == targets.shape == (len(windows), context)
    assert np.array_equal(targets[targets != MASKED], whole[1:])
    assert np.array_equal(tokens[targets != MASKED], whole[:-1])
    masked = np.count_nonzero(targets == MASKED)
    assert masked == len(windows) * context - (len(split) - 1)
    assert np.all(targets[:-1] != MASKED)


def test_rows_do_not_depend_on_their_batch(dataset: TokenDataset) -> None:
    """A row depends only on its id: any ids in any order, also repeated, give the rows that each gives alone, packed or not."""
    windows = Windows(dataset.split("train"), 50)
    last = len(windows) - 1
    ids = np.array([last, 3, 0, 3, 20, 19, last])
    for pack in (False, True):
        together = windows.batch(ids, pack)
        for row, i in enumerate(ids):
            alone = windows.batch(np.array([i]), pack)
            for a, b in zip(together, alone, strict=True):
                assert (a is None and b is None) or np.array_equal(a[row], b[0])


def test_packing_numbers_documents_and_masks_their_borders(dataset: TokenDataset) -> None:
    """The document number grows by one after each end token; no target belongs to another document than its token."""
    windows = Windows(dataset.split("train"), 700)
    tokens, targets, documents = windows.batch(np.arange(len(windows)), pack=True)
    plain_targets = windows.batch(np.arange(len(windows)))[1]
    assert documents is not None
    assert documents.dtype == np.int32
    assert np.all(documents[:, 0] == 0)
    ends = tokens == dataset.end
    assert ends.any()
    assert np.array_equal(np.diff(documents, axis=1), ends[:, :-1].astype(np.int32))
    assert np.all(targets[ends] == MASKED)
    assert np.array_equal(targets[~ends], plain_targets[~ends])


def test_no_ids_make_a_masked_row(dataset: TokenDataset) -> None:
    """An empty micro-batch is one fully masked row, so that every rank runs a forward pass."""
    windows = Windows(dataset.split("train"), 9)
    for pack in (False, True):
        tokens, targets, _ = windows.batch(np.array([], dtype=np.int64), pack)
        assert tokens.shape == (1, 9)
        assert np.all(targets == MASKED)
        assert np.all((tokens >= 0) & (tokens < dataset.vocab_size))


@pytest.mark.parametrize("bad", [-1, "len"])
def test_a_wrong_id_is_refused(dataset: TokenDataset, bad: int | str) -> None:
    """An id outside the split raises IndexError."""
    windows = Windows(dataset.split("eval"), 9)
    with pytest.raises(IndexError):
        windows.batch(np.array([0, len(windows) if bad == "len" else -1]))


def test_splits_cross_processes(dataset: TokenDataset) -> None:
    """A split pickles as its location, not its tokens, and reads the same afterwards."""
    split = dataset.split("train")
    raw = pickle.dumps(split)
    assert len(raw) < 1_000
    assert np.array_equal(pickle.loads(raw).read(5, 2_500), split.read(5, 2_500))


def test_a_folder_without_an_index_is_no_dataset(tmp_path: Path, dataset: TokenDataset) -> None:
    """Shards without an index raise DataError, with the command that finishes the dataset."""
    for file in Path(dataset.uri).glob("*.arrow"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(DataError, match=r"not a prepared dataset.*\n.*raydist data prepare"):
        TokenDataset(tmp_path)


def test_a_remote_dataset_is_cached_once_and_checked(
    dataset: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only shards that are read are downloaded; later reads use the cache instead of the storage; a damaged shard is refused."""
    monkeypatch.setenv("RAYDIST_CACHE", str(tmp_path / "cache"))
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in Path(dataset.uri).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    away = TokenDataset(remote(copy)).split("train")
    cache = tmp_path / "cache" / "data" / dataset.fingerprint
    first, second, third = (s.file for s in away.shards[:3])
    assert np.array_equal(away.read(0, 100), dataset.split("train").read(0, 100))
    assert [p.name for p in cache.glob("*.arrow")] == [first]
    (copy / first).unlink()
    again = TokenDataset(remote(copy)).split("train")
    assert np.array_equal(again.read(0, 100), away.read(0, 100))
    raw = bytearray((copy / second).read_bytes())
    raw[len(raw) // 2] ^= 1
    (copy / second).write_bytes(raw)
    with pytest.raises(DataError, match=second):
        again.read(0, away.shards[0].tokens + 1)
    (copy / third).unlink()
    with pytest.raises(DataError, match=f"{third} is missing"):
        again.read(away.shards[0].tokens + away.shards[1].tokens, len(away) - 1)
    assert [p.name for p in cache.glob("*.arrow")] == [first]


@pytest.mark.parametrize(
    "change",
    [
        {"fingerprint": "../../elsewhere"},
        {"fingerprint": "0" * 32},
        {"shard": "../evil.pth"},
        {"shard": "/tmp/evil.pth"},
        {"shard": "evil.pth"},
    ],
    ids=str,
)
def test_an_index_names_no_file_outside_its_folder(
    dataset: TokenDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str]
) -> None:
    """Of a dataset that somebody else has made, with a valid hash: nothing is read or written in a place of its choice."""
    folder, cache = tmp_path / "foreign", tmp_path / "cache"
    shutil.copytree(dataset.uri, folder)
    monkeypatch.setenv("RAYDIST_CACHE", str(cache))
    index = dataset.index
    if "shard" in change:
        first, *rest = index.train.shards
        train = dataclasses.replace(index.train, shards=(dataclasses.replace(first, file=change["shard"]), *rest))
        index = dataclasses.replace(index, train=train)
    else:
        index = dataclasses.replace(index, **change)
    (folder / "index.json").write_bytes(index.to_bytes())
    with pytest.raises(DataError, match="is damaged: the (fingerprint|name)"):
        TokenDataset(remote(folder)).split("train").read(0, 1)
    assert not cache.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["foreign"]


def test_a_changed_byte_is_noticed_when_its_block_is_read(tmp_path: Path) -> None:
    """Also if it changes after the shard was opened; other blocks can be read, and each block is compared once."""
    (tmp_path / "text").write_text("".join(f"{i}\n" for i in range(400_000)))
    prepare([str(tmp_path / "text")], str(tmp_path / "out"), eval_fraction=0)
    split = TokenDataset(tmp_path / "out").split("train")
    assert split.shards[0].bytes > 4 * BLOCK
    windows = Windows(split, 1024)
    windows.batch(np.arange(3))
    path = tmp_path / "out" / split.shards[0].file
    at = 3 * BLOCK - 5
    with path.open("r+b") as file:  # in place, as a disk or a stray write would
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    token = at // 2
    split.read(0, BLOCK // 2)
    with pytest.raises(
        DataError, match=f"{path.name}: bytes {2 * BLOCK} to {3 * BLOCK - 1} are not those that were written"
    ):
        split.read(token - 10_000, token - 9_000)
    with pytest.raises(DataError, match="not those that were written"):
        windows.batch(np.array([token // 1024]))
    with path.open("r+b") as file:
        file.seek(at)
        file.write(byte)
    windows.batch(np.array([token // 1024]))
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))
    windows.batch(np.array([token // 1024]))  # compared once, before


def test_changed_ends_of_documents_are_noticed(dataset: TokenDataset, tmp_path: Path) -> None:
    """A number that changed, and a file that is gone: DataError with its name, from whatever reads the ends."""
    out = Path(shutil.copytree(dataset.uri, tmp_path / "out"))
    path = out / "train-ends.bin"
    raw = path.read_bytes()
    path.write_bytes(bytes([raw[0] ^ 1, *raw[1:]]))
    for read in (TokenSplit.ends, lambda split: split.document(0)):
        with pytest.raises(DataError, match=r"train-ends\.bin: its bytes are not those that were written"):
            read(TokenDataset(out).split("train"))
    path.unlink()
    with pytest.raises(DataError, match=r"train-ends\.bin cannot be read"):
        TokenDataset(out).split("train").ends()
    path.write_bytes(raw)
    split = TokenDataset(out).split("train")
    assert split.ends() is split.ends(), "hashed once"


def test_an_index_without_hashes_of_blocks(dataset: TokenDataset, tmp_path: Path) -> None:
    """An older version's dataset is read as before, has the same fingerprint, and says that changes are not noticed."""
    old = shutil.copytree(dataset.uri, tmp_path / "old")
    index = dataset.index

    def bare(split: SplitIndex) -> SplitIndex:
        return dataclasses.replace(split, shards=tuple(dataclasses.replace(s, blocks=None) for s in split.shards))

    made = dataclasses.replace(index, train=bare(index.train), eval=bare(index.eval))
    assert b"blocks" not in made.to_bytes()
    (old / "index.json").write_bytes(made.to_bytes())
    found = TokenDataset(old)
    assert (found.fingerprint, index.has_block_hashes, found.index.has_block_hashes) == (
        dataset.fingerprint,
        True,
        False,
    )
    split, same = found.split("train"), dataset.split("train")
    assert np.array_equal(split.read(0, len(split)), same.read(0, len(same)))
