"""Sources: the files they name, the documents they are cut into, and the errors of bad ones."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raydist.data import documents, sources
from raydist.data.documents import Document
from raydist.data.shards import documents_of
from raydist.data.sources import Block, Piece
from raydist.errors import DataError


def read(names: Sequence[str], column: str = "text", block_bytes: int = 1 << 20) -> list[Document]:
    """All documents of these sources."""
    files = [f for n in names for f in sources.find(n)]
    return [d for b in sources.plan(files, column, block_bytes) for d in documents_of(b, column)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Files at several depths, with hidden ones and a cache among them."""
    for name in (
        "b.txt",
        "a/x.txt",
        "a/y.md",
        "a/deep/z.txt",
        ".hidden",
        ".git/config",
        "a/__pycache__/x.pyc",
    ):
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return tmp_path / "tree"


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("", ["a/deep/z.txt", "a/x.txt", "a/y.md", "b.txt"]),
        ("/b.txt", ["b.txt"]),
        ("/*.txt", ["b.txt"]),
        ("/**/*.txt", ["a/deep/z.txt", "a/x.txt", "b.txt"]),
        ("/a/**", ["a/deep/z.txt", "a/x.txt", "a/y.md"]),
        ("/*/?.[mt]*", ["a/x.txt", "a/y.md"]),
        ("/a/d*/z.txt", ["a/deep/z.txt"]),
        ("/**", ["a/deep/z.txt", "a/x.txt", "a/y.md", "b.txt"]),
        ("/.*", [".hidden"]),
    ],
)
def test_finds_files_folders_and_globs(tree: Path, pattern: str, found: list[str]) -> None:
    """Files are sorted by path, without hidden ones; a path and its file:// URI give the same files."""
    assert [d.decode() for d in read([f"{tree}{pattern}"]) if isinstance(d, bytes)] == found
    if "?" not in pattern:  # in a URI it begins the query
        assert [d.decode() for d in read([f"file://{tree}{pattern}"]) if isinstance(d, bytes)] == found


def test_relative_paths_are_of_the_working_directory(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths and globs refer to the working directory."""
    monkeypatch.chdir(tree)
    assert read(["b.txt"]) == read(["*.txt"]) == [b"b.txt"]


@pytest.mark.parametrize("name", ["nowhere", "no*.where", "a/none.txt"])
def test_nothing_there_is_an_error(tree: Path, name: str) -> None:
    """A path or glob without a file raises DataError."""
    with pytest.raises(DataError, match=r"no such file, and no match"):
        sources.find(f"{tree}/{name}")


def test_empty_files_are_an_error(tmp_path: Path) -> None:
    """A source of 0 bytes raises DataError."""
    (tmp_path / "e.txt").touch()
    with pytest.raises(DataError, match="is empty: 1 files, 0 bytes"):
        sources.find(str(tmp_path))


def test_an_unknown_scheme_is_an_error() -> None:
    """A scheme that pyarrow.fs does not know raises DataError with its reason."""
    with pytest.raises(DataError, match="source gopher://x/y"):
        sources.find("gopher://x/y")


def test_the_standard_library_is_stable_and_large_enough() -> None:
    """python-stdlib is sorted, has at least 7 MB of UTF-8, and neither tests nor files that a distribution may leave out."""
    files = sources.find("python-stdlib")
    assert [f.name for f in files] == sorted(f.name for f in files)
    assert sum(f.size for f in files) > 7_000_000
    names = {f.name for f in files}
    assert {"python-stdlib/argparse.py", "python-stdlib/json/decoder.py"} <= names
    assert not [n for n in names if "/test/" in n or "site-packages" in n]


@given(lines=st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n"), max_size=30), min_size=1),
       step=st.integers(1, 60))  # fmt: skip
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_cut_at_line_ends(tmp_path: Path, lines: list[str], step: int) -> None:
    """The pieces of a file, joined, are the file, and each begins at the start of a line, for any piece size."""
    path = tmp_path / "t.txt"
    path.write_text("\n".join(lines), newline="")
    raw = path.read_bytes()
    if raw:
        (file,) = sources.find(str(path))
        cut = [Piece(file, i, min(i + step, file.size), step) for i in range(0, file.size, step)]
        parts = [d for p in cut for d in documents.read(p, "text")]
        assert b"".join(p for p in parts if isinstance(p, bytes)) == raw
        assert all(p.endswith(b"\n") for p in parts[:-1] if isinstance(p, bytes))


def test_few_text_files_are_cut_and_many_are_not(tmp_path: Path) -> None:
    """One long file gives many documents, so that some can be held out; 1024 files give one document each."""
    (tmp_path / "one.txt").write_bytes(b"a line of text\n" * 20_000)
    assert 50 < len(read([str(tmp_path / "one.txt")])) < 100
    many = tmp_path / "many"
    many.mkdir()
    for i in range(1024):
        (many / f"{i:04d}.txt").write_bytes(b"a line of text\n" * (5_000 if i == 7 else 1))
    found = read([str(many)])
    assert len(found) == 1024
    assert len(found[7]) == 75_000


@pytest.fixture
def rows() -> list[str]:
    """Texts with characters that JSON escapes."""
    return [f'row {i} "λ"\n\\ {"x" * i}' for i in range(40)]


def test_json_lines(tmp_path: Path, rows: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line's column is a document; nulls, empty texts and blank lines are skipped; pieces and gzip give the same
    documents."""
    body = "\ufeff" + "\n".join(
        [*(json.dumps({"id": 1, "body": r}) for r in rows), "", '{"body": null}', '{"body": ""}']
    )
    (tmp_path / "c.jsonl").write_bytes(body.encode())
    (tmp_path / "d.ndjson.gz").write_bytes(gzip.compress(body.encode()))
    expected = [r.encode() for r in rows]
    assert read([f"{tmp_path}/c.jsonl"], "body") == expected
    assert read([f"{tmp_path}/d.ndjson.gz"], "body") == expected
    monkeypatch.setattr(sources, "_LINES", 100)
    assert read([f"{tmp_path}/c.jsonl"], "body", block_bytes=150) == expected


def test_a_line_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is joined once, however many chunks it has, and refused above a limit, with its place."""
    monkeypatch.setattr(documents, "_CHUNK", 10)
    path = tmp_path / "x.jsonl"
    text = "a" * 20_000
    path.write_text(f'{{"text": "b"}}\n{{"text": "{text}"}}\n{{"text": "c"}}')
    assert read([str(path)]) == [b"b", text.encode(), b"c"]
    monkeypatch.setattr(documents, "LONGEST_LINE", 5_000)
    with pytest.raises(DataError, match=r"x.jsonl.*a line of more than"):
        read([str(path)])


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet(tmp_path: Path, rows: list[str], kind: pa.DataType) -> None:
    """The column is read by name, with any text type, across row groups; nulls are skipped."""
    values = pa.array([*rows, None], type=pa.string()).cast(kind)
    pq.write_table(pa.table({"n": range(41), "body": values}), tmp_path / "c.parquet", row_group_size=7)
    assert read([str(tmp_path)], "body", block_bytes=300) == [r.encode() for r in rows]


def test_parquet_of_token_ids(tmp_path: Path) -> None:
    """A column of lists is read as token ids."""
    pq.write_table(pa.table({"ids": [[1, 2, 3], [], [4]]}), tmp_path / "c.parquet")
    assert [np.asarray(d).tolist() for d in read([str(tmp_path)], "ids")] == [[1, 2, 3], [4]]


BAD = [
    ("x.txt", b"good\n\xff\xfe", r"x\.txt: bad UTF-8: byte 0xff at offset 5"),
    ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}', r"x\.jsonl: line 2: bad UTF-8: byte 0xff at column 11"),
    ("x.jsonl", b'{"text": "a"}\n{"text": ', r"x\.jsonl: line 2: not JSON"),
    ("x.jsonl", b'["a"]', r"x\.jsonl: line 1: list, not an object"),
    ("x.jsonl", b'{"body": "a", "id": 3}', r'line 1: no column "text"\n.*--column .*: body, id'),
    ("x.jsonl", b'{"text": 5}', r'line 1, column "text": a document has type int'),
    ("x.jsonl", b'{"text": "\\ud800"}', r'line 1, column "text": surrogates'),
    ("x.parquet", b"PAR1 this is none", r"x\.parquet: not a readable Parquet file"),
]


@pytest.mark.parametrize(("name", "body", "message"), BAD)
def test_bad_input_is_named_with_its_place(tmp_path: Path, name: str, body: bytes, message: str) -> None:
    """Bad input raises one DataError with the file, the line or offset, what is wrong, and a hint."""
    (tmp_path / name).write_bytes(body)
    with pytest.raises(DataError, match=message) as caught:
        read([str(tmp_path / name)])
    assert caught.value.hint


def test_places_are_right_in_later_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a file that is read in pieces, line and offset count from the start of the file."""
    monkeypatch.setattr(sources, "_LINES", 64)
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "abc"}\n' * 100 + b"{}\n")
    with pytest.raises(DataError, match="line 101: no column"):
        read([str(tmp_path / "x.jsonl")])
    (tmp_path / "x.txt").write_bytes(b"0123456\n" * 2_000 + b"\xff\n")
    with pytest.raises(DataError, match="at offset 16000 "):
        read([str(tmp_path / "x.txt")])


def test_bad_parquet_columns(tmp_path: Path) -> None:
    """A missing column is reported before any row is read, with the columns that exist; invalid UTF-8 is reported with its
    row."""
    pq.write_table(pa.table({"a": ["x"], "b": [1]}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r'c\.parquet: no column "text"\n.*--column \(data.column\): a, b'):
        sources.plan(sources.find(str(tmp_path)), "text", 1 << 20)
    bad = pa.array([b"ok", b"\xff"], type=pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), tmp_path / "c.parquet")
    with pytest.raises(DataError, match=r"c\.parquet: row 1.*bad UTF-8"):
        read([str(tmp_path)])


def test_a_file_that_shrinks_is_noticed(tmp_path: Path) -> None:
    """A source that becomes shorter while it is prepared raises DataError."""
    path = tmp_path / "x.txt"
    path.write_bytes(b"line\n" * 100)
    files = sources.find(str(path))
    path.write_bytes(b"line\n" * 10)
    with pytest.raises(DataError, match="has become shorter"):
        [d for b in sources.plan(files, "text", 1 << 20) for d in documents_of(b, "text")]


def test_blocks_are_a_partition_and_cross_processes(tmp_path: Path) -> None:
    """Blocks keep the order of files, are numbered from 0, and survive JSON."""
    for i in range(9):
        (tmp_path / f"{i}.txt").write_bytes(b"x\n" * (i * 300 + 1))
    blocks = sources.plan(sources.find(str(tmp_path)), "text", 3_000)
    assert [b.number for b in blocks] == list(range(len(blocks)))
    assert len(blocks) > 3
    assert [Block.from_json(b.to_json()) for b in blocks] == blocks
    assert sum(b.bytes for b in blocks) == sum(p.stat().st_size for p in tmp_path.iterdir())
    assert [(p.file.path, p.start) for b in blocks for p in b.pieces] == sorted(
        (p.file.path, p.start) for b in blocks for p in b.pieces
    )


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's own module with sources."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "def records():\n    yield 'one'\n    yield b'\\xff raw'\n    yield [1, 2, 256]\n    yield ''\n"
        "listed = ['a', 'b']\nnumber = 3\ndef bad():\n    yield {}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_a_users_own_source(module: str) -> None:
    """A callable or an iterable gives str, raw bytes or token ids."""
    block = Block(0, (), f"{module}:records")
    assert sources.is_records(block.records)
    found = [d if isinstance(d, bytes) else d.tolist() for d in documents_of(block, "text")]
    assert found == [b"one", b"\xff raw", [1, 2, 256]]
    assert list(documents_of(Block(0, (), f"{module}:listed"), "text")) == [b"a", b"b"]
    assert len(sources.code_of(block.records)) == 32


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("none", "has no 'none'"),
        ("number", "returns int, not an iterable"),
        ("bad", "document 0: a document has type dict"),
    ],
)
def test_a_users_source_that_is_wrong(module: str, attribute: str, message: str) -> None:
    """Each mistake raises one DataError that names the source."""
    with pytest.raises(DataError, match=f"source {module}:{attribute}: .*{message}"):
        list(documents_of(Block(0, (), f"{module}:{attribute}"), "text"))


def test_a_missing_module_is_an_error() -> None:
    """`records` and `code_of` raise DataError for a missing module."""
    for ask in (sources.records, sources.code_of):
        with pytest.raises(DataError, match="no module 'no_such_module'"):
            ask("no_such_module:records")


def test_an_error_of_the_user_s_code_names_its_line(module: str, tmp_path: Path) -> None:
    """An error during import or iteration gives the exception's type and the user's line, without a frame of raydist."""
    (tmp_path / f"{module}_late.py").write_text("def rows():\n    yield 'a'\n    yield [][1]\n")
    (tmp_path / f"{module}_import.py").write_text("import json\njson.loads('{')\n")
    (tmp_path / f"{module}_syntax.py").write_text("x = 1\ndef f(:\n")
    for source, says in {
        f"{module}_late:rows": rf"IndexError: .*{module}_late.py, line 3, in rows",
        f"{module}_import:rows": r"JSONDecodeError: .*decoder.py",
        f"{module}_syntax:rows": rf"SyntaxError: .*{module}_syntax.py, line 2",
    }.items():
        with pytest.raises(DataError, match=f"source {source}: {says}"):
            list(sources.records(source))
