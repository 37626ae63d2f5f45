"""Preparing a dataset: always the same bytes, complete or absent, train and eval disjoint."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raydist.data import documents as documents_module
from raydist.data import open_or_prepare, shards
from raydist.data import prepare as module
from raydist.data.dataset import TokenDataset
from raydist.data.prepare import Progress, prepare
from raydist.data.shards import Made
from raydist.data.sources import Block
from raydist.errors import DataError, StorageError
from raydist.storage import Storage

SETTINGS: dict[str, Any] = {"eval_fraction": 0.2, "block_bytes": 9_000, "shard_tokens": 4_000}


def contents(folder: str | Path) -> dict[str, bytes]:
    """The bytes of every file of a folder, hidden ones included."""
    root = Path(folder)
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def documents(dataset: TokenDataset, name: Any) -> list[str]:
    """The texts of a split."""
    split = dataset.split(name)
    tokens = split.read(0, len(split))
    return [dataset.tokenizer.decode(t) for t in np.split(tokens, np.flatnonzero(tokens == dataset.end) + 1)[:-1]]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_same_input_same_bytes(corpus: Path, tmp_path: Path, tokenizer: str) -> None:
    """Every file of the dataset is the same for any order of the blocks, with one thread or several."""

    def backwards(make: Callable[[Block], Made], blocks: Sequence[Block]) -> Iterable[Made]:
        return [make(b) for b in reversed(blocks)]

    def threads(make: Callable[[Block], Made], blocks: Sequence[Block]) -> Iterable[Made]:
        made: list[Made] = []
        running = [threading.Thread(target=lambda b=b: made.append(make(b))) for b in blocks]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        return made

    prepare([str(corpus)], str(tmp_path / "0"), tokenizer, **SETTINGS)
    first = contents(tmp_path / "0")
    assert len([n for n in first if n.endswith(".arrow")]) > 4
    for i, how in enumerate((backwards, threads), start=1):
        index = prepare([str(corpus)], str(tmp_path / str(i)), tokenizer, map_files=how, **SETTINGS)
        assert contents(tmp_path / str(i)) == first
    assert index.tokenizer.name == tokenizer
    assert index.dtype == "uint16"


def test_a_large_vocabulary_takes_uint32() -> None:
    """A vocabulary of 65,536 ids fits in uint16; one more id needs uint32."""
    assert shards.token_type(65_536) == np.uint16
    assert shards.token_type(65_537) == np.uint32


def test_train_and_eval_share_no_document(tmp_path: Path) -> None:
    """All copies of a document are in one split; each split has about its share of the distinct documents."""
    lines = [f'{{"text": "document {i % 500}"}}' for i in range(2_000)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    index = prepare([f"{tmp_path}/c.jsonl"], str(tmp_path / "out"), eval_fraction=0.2)
    dataset = TokenDataset(tmp_path / "out")
    train, held = documents(dataset, "train"), documents(dataset, "eval")
    assert not set(train) & set(held)
    assert sorted(train + held) == sorted(f"document {i % 500}" for i in range(2_000))
    assert 70 < len(set(held)) < 130
    assert (index.train.documents, index.eval.documents) == (len(train), len(held))
    assert index.train.bytes + index.eval.bytes == sum(len(t) for t in train + held)


def test_shuffled_documents_fall_on_the_same_side(tmp_path: Path) -> None:
    """The split of a document depends on its content alone, not on its place in the corpus."""
    lines = [f'{{"text": "document {i}"}}' for i in range(300)]
    sides = []
    for name, order in (("a", lines), ("b", lines[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(order))
        prepare([f"{tmp_path}/{name}.jsonl"], str(tmp_path / name), eval_fraction=0.3)
        sides.append(sorted(documents(TokenDataset(tmp_path / name), "eval")))
    assert sides[0] == sides[1]


@pytest.mark.parametrize("fraction", [1e-9, 0.98])
def test_a_small_corpus_has_both_splits(tmp_path: Path, fraction: float) -> None:
    """If chance left a split empty, one document is moved to it."""
    (tmp_path / "c.jsonl").write_text("\n".join(f'{{"text": "{word}"}}' for word in ("one", "two", "three")))
    index = prepare([f"{tmp_path}/c.jsonl"], str(tmp_path / "out"), eval_fraction=fraction)
    assert sorted([index.train.documents, index.eval.documents]) == [1, 2]
    dataset = TokenDataset(tmp_path / "out")
    assert sorted(documents(dataset, "train") + documents(dataset, "eval")) == ["one", "three", "two"]
    assert not any(p.name.startswith(".") for p in (tmp_path / "out").iterdir())


@pytest.mark.parametrize("fraction", [0.0, 0.98])
def test_one_document_is_trained_on(tmp_path: Path, fraction: float) -> None:
    """A single document is never held out, and with eval_fraction 0 no document is."""
    (tmp_path / "c.txt").write_text("all there is")
    index = prepare([f"{tmp_path}/c.txt"], str(tmp_path / "out"), eval_fraction=fraction)
    assert (index.train.documents, index.eval.documents) == (1, 0)
    assert len(TokenDataset(tmp_path / "out").split("eval")) == 0
    assert index.unigram_nats == 0.0


def test_unigram_is_the_entropy_of_the_eval_bytes(dataset: TokenDataset) -> None:
    """unigram_nats is the entropy of the eval split's bytes, without end tokens, in nats a byte."""
    split = dataset.split("eval")
    tokens = split.read(0, len(split))
    counts = np.bincount(tokens[tokens < 256])
    share = counts[counts > 0] / counts.sum()
    assert dataset.index.unigram_nats == pytest.approx(-(share * np.log(share)).sum(), abs=1e-5)


KILLED = """
import os, signal, sys
from raydist.data.prepare import prepare

replace, left = os.replace, 0

def dying(*args):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*args)

os.replace = dying
for writes in range(100):
    pid = os.fork()
    if pid == 0:
        left = writes
        out = f"{sys.argv[2]}/cut-{writes}"
        prepare([sys.argv[1]], out, "bpe:300", eval_fraction=0.2, block_bytes=20_000, shard_tokens=20_000)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    print(status, flush=True)
    if status == 0:
        break
"""


def test_killed_anywhere_it_goes_on_to_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    """After SIGKILL before any of the files is renamed into place, no dataset opens, and the same command produces the same
    bytes."""
    settings: dict[str, Any] = {"eval_fraction": 0.2, "block_bytes": 20_000, "shard_tokens": 20_000}
    index = prepare([str(corpus)], str(tmp_path / "whole"), "bpe:300", **settings)
    expected = contents(tmp_path / "whole")
    ran = subprocess.run(
        [sys.executable, "-c", KILLED, str(corpus), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    *killed, last = map(int, ran.stdout.split())
    blocks = len(index.train.shards)
    # One rename each: the tokenizer (twice), per block the ends of its documents and an entry, the files, the index.
    assert killed == [signal.SIGKILL] * (2 + 2 * blocks + len(index.files()) + 1)
    assert last == 0
    kept: list[int] = []
    for writes in range(len(killed)):
        out = tmp_path / f"cut-{writes}"
        with pytest.raises(DataError, match="not a prepared dataset"):
            TokenDataset(out)
        reports: list[Progress] = []
        prepare([str(corpus)], str(out), "bpe:300", progress=reports.append, **settings)
        assert contents(out) == expected
        kept.append([r.bytes_done for r in reports if not r.bytes_done or r.phase == "tokens"][1])
    # Finished blocks are not repeated: later kills leave more of them, the last one all.
    assert kept == sorted(kept)
    assert kept[0] == 0
    assert kept[-1] == sum(p.stat().st_size for p in corpus.iterdir())


def test_work_on_other_input_is_not_taken_over(tmp_path: Path) -> None:
    """After an interruption and a changed source, the dataset has only the new sources."""
    source = tmp_path / "src"
    source.mkdir()
    for i in range(4):
        (source / f"{i}.txt").write_bytes(f"old {i} line\n".encode() * 500)

    class Stop(Exception):
        pass

    def stop(at: Progress) -> None:
        if at.bytes_done > 10_000:
            raise Stop

    with pytest.raises(Stop):
        prepare([str(source)], str(tmp_path / "a"), progress=stop, **SETTINGS)
    assert contents(tmp_path / "a")
    (source / "1.txt").write_bytes(b"new 1 line\n" * 500)
    (source / "3.txt").unlink()
    prepare([str(source)], str(tmp_path / "a"), **SETTINGS)
    prepare([str(source)], str(tmp_path / "b"), **SETTINGS)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_finished_dataset_is_returned_or_protected(corpus: Path, tmp_path: Path) -> None:
    """The same request again does nothing; a different request, or a source that changed since, is refused, and the dataset stays
    as it is."""
    source = tmp_path / "src"
    source.mkdir()
    (source / "a.txt").write_bytes(b"line of text\n" * 900)
    out = str(tmp_path / "out")
    index = prepare([str(source)], out)
    before = contents(out)
    reports: list[Progress] = []
    assert prepare([str(source)], out, progress=reports.append) == index
    assert reports == []
    with pytest.raises(DataError, match="holds another dataset"):
        prepare([str(source)], out, eval_fraction=0.5)
    with pytest.raises(DataError, match="holds another dataset"):
        prepare([str(corpus)], out)
    made = (tmp_path / "out" / "index.json").stat().st_mtime_ns
    os.utime(source / "a.txt", ns=(made + 10**9, made + 10**9))
    with pytest.raises(DataError, match=r"a\.txt was changed after"):
        prepare([str(source)], out)
    assert contents(out) == before


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("x.txt", b"\xff", "bad UTF-8"),
        ("x.txt", b"", "is empty"),
        ("x.jsonl", b'{"text": ""}\n\n', "is empty: it has no documents"),
        ("x.jsonl", b'{"body": "a"}', 'no column "text"'),
    ],
)
def test_bad_input_leaves_nothing(tmp_path: Path, name: str, body: bytes, message: str) -> None:
    """Bad input raises one DataError, and leaves not even an empty folder."""
    (tmp_path / name).write_bytes(body)
    with pytest.raises(DataError, match=message):
        prepare([str(tmp_path / name)], str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_bad_input_keeps_what_is_done_and_what_is_not_ours(tmp_path: Path) -> None:
    """Blocks that were finished before the bad one are kept for the next attempt; the user's own files are not touched."""
    source, out = tmp_path / "src", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "train-x.arrow").write_text("mine too")
    for i in range(3):
        (source / f"{i}.txt").write_bytes(b"line\n" * 2_000)
    (source / "9.txt").write_bytes(b"\xff" * 2_000)
    with pytest.raises(DataError, match="bad UTF-8"):
        prepare([str(source)], str(out), **SETTINGS)
    with pytest.raises(DataError, match="not a prepared dataset"):
        TokenDataset(out)
    (source / "9.txt").write_bytes(b"line\n" * 400)
    reports: list[Progress] = []
    prepare([str(source)], str(out), progress=reports.append, **SETTINGS)
    assert next(r.bytes_done for r in reports[1:]) > 0
    assert (out / "notes.txt").read_text() == "mine"
    assert (out / "train-x.arrow").read_text() == "mine too"


FULL = """
import resource, sys
from raydist.data.prepare import prepare
from raydist.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (12_000, 12_000))
try:
    prepare([sys.argv[1]], sys.argv[2])
except StorageError as error:
    print(error)
    sys.exit(7)
"""


def test_storage_that_refuses_a_write(corpus: Path, tmp_path: Path) -> None:
    """If the kernel stops a write in the middle of a shard: one StorageError with its reason, no dataset and no partial file;
    with space again the same command finishes."""
    child = subprocess.run(
        [sys.executable, "-c", FULL, str(corpus), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert child.returncode == 7
    assert "arrow: File too large" in child.stdout
    assert "the same command then continues" in child.stdout
    assert not [n for n in contents(tmp_path / "out") if n.endswith((".arrow", "index.json"))]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 12_000
    assert prepare([str(corpus)], str(tmp_path / "out")).train.tokens > 12_000


def test_shards_must_be_seen_from_here(corpus: Path, tmp_path: Path) -> None:
    """If shards are on another node's own disk, the commit is refused, with the remedy."""

    def elsewhere(make: Callable[[Block], Made], blocks: Sequence[Block]) -> Iterable[Made]:
        for block in blocks:
            made = make(block)
            for shard in made.train.shards:
                (tmp_path / "out" / shard.file).unlink()
            yield made

    with pytest.raises(StorageError, match=r"not visible here\n.*all nodes share"):
        prepare([str(corpus)], str(tmp_path / "out"), map_files=elsewhere, **SETTINGS)
    with pytest.raises(DataError, match="not a prepared dataset"):
        TokenDataset(tmp_path / "out")


def test_on_a_filesystem_that_is_not_local(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through pyarrow.fs alone, as for S3, the same files are written."""

    def remote(uri: str) -> Storage:
        storage = Storage(uri)
        storage.local = None
        return storage

    prepare([str(corpus)], str(tmp_path / "a"), **SETTINGS)
    # A local disk needs these folders, an object store does not.
    (tmp_path / "b" / ".prepare").mkdir(parents=True)
    monkeypatch.setattr(module, "Storage", remote)
    monkeypatch.setattr(shards, "Storage", remote)
    prepare([str(corpus)], str(tmp_path / "b"), **SETTINGS)
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


def test_another_process_finishes_it_on_an_object_store(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no lock. What the other one has committed stays as it is, and is returned."""

    def remote(uri: str) -> Storage:
        storage = Storage(uri)
        storage.local = None
        return storage

    out = str(tmp_path / "out")
    prepare([str(corpus)], out, **SETTINGS)
    whole, index, join = contents(out), Path(out, "index.json").read_bytes(), module._joined
    Path(out, "index.json").unlink()
    Path(out, ".prepare").mkdir()

    def late(*given: Any) -> Any:
        """The other one commits, and deletes the journal, just before this one joins the ends of the documents."""
        Path(out, "index.json").write_bytes(index)
        Storage(out).delete(".prepare")
        return join(*given)

    monkeypatch.setattr(module, "_joined", late)
    monkeypatch.setattr(module, "Storage", remote)
    monkeypatch.setattr(shards, "Storage", remote)
    prepare([str(corpus)], out, **SETTINGS)
    assert contents(out) == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_fraction": 1.0}, "eval_fraction 1.0"),
        ({"tokenizer": "bpe:3"}, "bpe:3"),
        ({"names": []}, "no source"),
    ],
)
def test_wrong_settings_are_found_before_work(corpus: Path, tmp_path: Path, changes: Any, message: str) -> None:
    """A wrong setting raises DataError, and nothing is written."""
    with pytest.raises(DataError, match=message):
        prepare(**{"names": [str(corpus)], "out": str(tmp_path / "out"), **changes})
    assert not (tmp_path / "out").exists()


def test_token_ids_as_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token ids from a user's source are stored unchanged, each document with one end token; ids outside the vocabulary are
    refused."""
    name = f"ids_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text("good = [[1, 2, 256], [3], 'a']\nbad = [[1, 257]]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    prepare([f"{name}:good"], str(tmp_path / "good"), eval_fraction=0.0)
    split = TokenDataset(tmp_path / "good").split("train")
    assert split.read(0, len(split)).tolist() == [1, 2, 256, 3, 256, 97, 256]
    with pytest.raises(DataError, match=r"token ids has 1 to 257: bytes has \[0, 257\)"):
        prepare([f"{name}:bad"], str(tmp_path / "bad"))
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64(), 3)])
def test_token_ids_in_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: pa.DataType) -> None:
    """Lists of any integers, read in batches of few rows where they are long; one with a null in it is refused, with its row."""
    monkeypatch.setattr(documents_module, "_BATCH_BYTES", 20)
    rows = [[1, 2, 256], None, [3, 4, 5], [6, 7, 8]]
    pq.write_table(pa.table({"text": pa.array(rows, kind)}), tmp_path / "ids.parquet")
    prepare([str(tmp_path / "ids.parquet")], str(tmp_path / "out"), eval_fraction=0.0)
    split = TokenDataset(tmp_path / "out").split("train")
    assert split.read(0, len(split)).tolist() == [1, 2, 256, 3, 4, 5, 256, 6, 7, 8, 256]
    pq.write_table(pa.table({"text": pa.array([[1, 2, 3], [1, None, 3]], kind)}), tmp_path / "null.parquet")
    with pytest.raises(DataError, match='row 1, column "text": a document has type list'):
        prepare([str(tmp_path / "null.parquet")], str(tmp_path / "bad"))


def asked(**changes: Any) -> SimpleNamespace:
    """The section `data` of a job."""
    return SimpleNamespace(
        **{
            "source": None,
            "path": None,
            "tokenizer": "bytes",
            "column": "text",
            "eval_fraction": 0.2,
            "format": "text",
            **changes,
        }
    )


def test_a_job_prepares_its_source_once(tmp_path: Path) -> None:
    """A second call returns the same dataset without work; changed files, or other settings, give another dataset."""
    source = tmp_path / "src"
    source.mkdir()
    (source / "a.txt").write_bytes(b"line of text\n" * 2_000)
    storage = str(tmp_path / "runs")
    reports: list[Progress] = []
    first = open_or_prepare(asked(source=str(source)), storage, reports.append)
    assert reports[-1].bytes_done == 26_000
    assert Path(first).parent == tmp_path / "runs" / ".data"
    reports.clear()
    assert open_or_prepare(asked(source=str(source)), storage, reports.append) == first
    assert reports == []
    assert open_or_prepare(asked(source=str(source), eval_fraction=0.3), storage) != first
    (source / "a.txt").write_bytes(b"LINE of text\n" * 2_000)
    changed = open_or_prepare(asked(source=str(source)), storage)
    assert TokenDataset(changed).fingerprint != TokenDataset(first).fingerprint
    assert open_or_prepare(asked(path=first), storage) == first
    with pytest.raises(DataError, match="not a prepared dataset"):
        open_or_prepare(asked(path=str(source)), storage)
    with pytest.raises(DataError, match="neither source nor path"):
        open_or_prepare(asked(), storage)


def test_drivers_at_once_make_it_once(corpus: Path, tmp_path: Path) -> None:
    """Three processes that start together return the same complete dataset; one of them prepared it."""
    script = (
        "import sys; from types import SimpleNamespace as S; from raydist.data import open_or_prepare\n"
        "data = S(source=sys.argv[1], path=None, tokenizer='bpe:300', column='text', eval_fraction=0.2, format='text')\n"
        "made = []\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "uri = open_or_prepare(data, sys.argv[2], made.append); print(len(made), uri)"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(corpus), str(tmp_path)],
            env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    ended = []
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in started:
        ended.append(process.communicate()[0].split())
        assert process.returncode == 0
    assert len({uri for _, uri in ended}) == 1
    assert sorted(made == "0" for made, _ in ended) == [False, True, True]
    uri = ended[0][1]
    assert not [n for n in contents(uri) if n.startswith(".")]
    prepare([str(corpus)], str(tmp_path / "alone"), "bpe:300", eval_fraction=0.2)
    assert contents(uri) == contents(tmp_path / "alone")
