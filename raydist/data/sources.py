"""The sources of text: files of several kinds, divided into blocks that can be read independently, in a fixed order.

Runs anywhere: in the preparing process, and in Ray Data's tasks. numpy and pyarrow.

    python-stdlib              the .py files of Python's standard library: real text that every machine has
    FILE, FOLDER, GLOB         local, or any URI of pyarrow.fs (s3://bucket/**/*.pq); folders include subfolders
    package.module:attribute   an iterable of documents, or a callable that returns one; read in the preparing
    process

The name decides whether a file is Parquet (.parquet, .pq), JSON lines (.jsonl, .ndjson), or text; .gz, .zst, .bz2, .lz4
and .br are decompressed. A row or line is one document: text, bytes, or a list of token ids. A text file is one
document; fewer than 1024 text files are cut at line ends into about 1024 documents, so that the
eval split samples many places. Hidden files and __pycache__ are skipped in folders, and by globs that do not name them.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import json
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import xxhash

from raydist import remote_filesystem
from raydist.errors import DataError, UserError
from raydist.parsing import parse_json
from raydist.paths import local_path
from raydist.redact import redact
from raydist.storage import Storage

Kind = Literal["text", "jsonl", "parquet"]
STDLIB = "python-stdlib"
_COMPRESSED = (".gz", ".zst", ".bz2", ".lz4", ".br")
_RECORDS = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_STDLIB_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "idlelib", "tkinter"}
    | {"turtledemo", "lib2to3", "distutils", "ensurepip", "pydoc_data"}
)
"""Tests, generated text, and packages that some distributions split off."""

_FEW_TEXTS = _TEXT_DOCUMENTS = 1024
_SMALLEST_TEXT, _LARGEST_TEXT = 4 << 10, 16 << 20
_LINES = 32 << 20
"""Bytes per piece of JSON lines."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file: `path` in the filesystem of the URI `root`; `name` for messages; `mtime_ns` may be unknown."""

    root: str
    path: str
    name: str
    kind: Kind
    size: int
    mtime_ns: int | None

    @property
    def splittable(self) -> bool:
        """Whether parts of it can be read independently."""
        return not self.path.endswith(_COMPRESSED)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file: the lines that start at bytes [start, stop), or Parquet's row groups [start, stop)."""

    file: SourceFile
    start: int
    stop: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """Pieces that one process prepares together: the unit of parallel work and of resuming.

    `records` names a user's own source instead; such a block has no pieces.
    """

    number: int
    pieces: tuple[Piece, ...]
    records: str = ""

    @property
    def bytes(self) -> int:
        """Bytes to read; for Parquet before decompression."""
        return sum(p.bytes for p in self.pieces)

    def to_json(self) -> str:
        """JSON for transfer to another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Block:
        """The inverse of `to_json`."""
        raw = parse_json(text)
        pieces = tuple(Piece(**{**p, "file": SourceFile(**p["file"])}) for p in raw["pieces"])
        return cls(raw["number"], pieces, raw["records"])


def is_records(source: str) -> bool:
    """Whether `source` names an attribute of a module, not files."""
    return bool(_RECORDS.fullmatch(source)) and not Path(source).exists()


def records(source: str) -> Iterable[Any]:
    """The documents of "package.module:attribute". Raises DataError if it does not exist, and for errors of the user's code, with
    their location.
    """
    module, _, attribute = source.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
        documents = found() if callable(found) else found
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise _user_error(source, error) from error
        raise DataError(
            f"source {source}: no module {error.name!r}", "run from the folder that holds it, or install it"
        ) from None
    except Exception as error:
        if isinstance(error, AttributeError) and error.name == attribute and module in sys.modules:
            raise DataError(
                f"source {source}: {module} has no {attribute!r}", "check the name after the colon"
            ) from None
        raise _user_error(source, error) from error
    if isinstance(documents, str | bytes) or not isinstance(documents, Iterable):
        raise DataError(
            f"source {source}: returns {type(documents).__name__}, not an iterable of documents",
            "yield each document as str, bytes or a list of token ids",
        )
    return _with_user_errors(source, documents)


def _with_user_errors(source: str, documents: Iterable[Any]) -> Iterator[Any]:
    try:
        yield from documents
    except Exception as error:
        raise _user_error(source, error) from error


def _user_error(source: str, error: Exception) -> DataError:
    """The DataError for an error in the user's code, with its line."""
    where = ""
    if isinstance(error, SyntaxError):
        where = f" ({error.filename}, line {error.lineno})"
    else:
        theirs = [
            f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and f.filename[0] != "<"
        ]
        if theirs:
            where = f" ({theirs[-1].filename}, line {theirs[-1].lineno}, in {theirs[-1].name})"
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return DataError(
        f"source {source}: {type(error).__name__}: {message}{where}",
        "the source's own code raises it: fix it there",
    )


def find(source: str) -> list[SourceFile]:
    """The files of a source, sorted by path. Raises DataError if there are none, or if all are empty."""
    if not source.strip():
        raise DataError("a source has no name", f"give a file, a folder, a quoted glob, a URI, or {STDLIB}")
    if source == STDLIB:
        files = _standard_library()
    else:
        try:
            files = _list(source)
        except (OSError, pa.ArrowException, UserError) as error:
            reason = error.message if isinstance(error, UserError) else remote_filesystem.reason(error)
            hint = remote_filesystem.remedy(source, "check the path or URI, and its read permission")
            raise DataError(f"source {source}: {reason.removeprefix(f'storage {redact(source)!r}: ')}", hint) from error
    if not files:
        raise DataError(
            f"source {source}: no such file, and no match",
            "give a file, a folder, or a quoted glob",
        )
    if not any(f.size for f in files):
        raise DataError(f"source {source} is empty: {len(files)} files, 0 bytes", "give files with text in them")
    return files


def _standard_library() -> list[SourceFile]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, below, names in os.walk(root):
        below[:] = set(below) - _STDLIB_LEFT_OUT  # not descended into: site-packages may be large
        for name in set(names) - _STDLIB_LEFT_OUT:
            # Build settings differ by machine.
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                path = Path(folder, name)
                inside = path.relative_to(root).as_posix()
                # No mtime: an installer sets it, and the Python version is sufficient.
                found.append(SourceFile("", str(path), f"{STDLIB}/{inside}", "text", path.stat().st_size, None))
    return sorted(found, key=lambda f: f.name)


def _list(source: str) -> list[SourceFile]:
    remote = "://" in source
    place, mark, query = source.partition("?") if remote else (source, "", "")
    base, pattern = place, ""
    first = next((i for i, c in enumerate(place) if c in ("*[" if remote else "*?[")), None)
    if first is not None and (remote or not local_path(place).exists()):
        cut = place.rfind("/", 0, first)
        base, pattern = place[:cut] if cut > 0 else "/" if cut == 0 else ".", place[cut + 1 :]
    uri = base + mark + query
    storage = Storage(uri)
    root = "" if storage.local is not None else uri
    info = storage.fs.get_file_info(storage.root)
    if info.type == pafs.FileType.File:
        return [] if pattern else [_file(root, info, source)]
    if info.type != pafs.FileType.Directory:
        return []
    wanted = re.compile(_glob(pattern)) if pattern else None
    found = []
    for entry in storage.fs.get_file_info(pafs.FileSelector(storage.root, recursive=True)):
        inside = PurePosixPath(entry.path).relative_to(storage.root)
        if entry.type != pafs.FileType.File or "__pycache__" in inside.parts:
            continue
        if "/." in f"/{inside}" and "/." not in f"/{pattern}":
            continue
        if wanted is None or wanted.fullmatch(str(inside)):
            found.append(_file(root, entry, f"{base.rstrip('/')}/{inside}" if base != "." else str(inside)))
    return sorted(found, key=lambda f: f.path)


def _glob(pattern: str) -> str:
    """A regular expression for a path: `**` matches any number of folders; `*` and `?` do not match `/`."""
    out = ""
    for i, part in enumerate(parts := pattern.split("/")):
        last = i == len(parts) - 1
        if part == "**":
            out += ".*" if last else "(?:.*/)?"
        else:
            plain = fnmatch.translate(part).removeprefix("(?s:").removesuffix(r")\Z")
            out += plain.replace(".*", "[^/]*") + ("" if last else "/")
    return out


def _file(root: str, info: pafs.FileInfo, name: str) -> SourceFile:
    stem = info.path
    for ending in _COMPRESSED:
        stem = stem.removesuffix(ending)
    kind: Kind = "text"
    if stem.endswith((".jsonl", ".ndjson")):
        kind = "jsonl"
    elif stem.endswith((".parquet", ".pq")):
        kind = "parquet"
    return SourceFile(root, info.path, redact(name), kind, int(info.size), info.mtime_ns)


def plan(files: Sequence[SourceFile], column: str | None, block_bytes: int) -> list[Block]:
    """The blocks of these files: a pure function of their names, sizes and (Parquet) row groups.

    `column`: None for conversations, which are rows. Raises DataError if a Parquet file cannot be read or has no `column`.
    """
    if column is None and (text := next((f for f in files if f.kind == "text"), None)) is not None:
        raise DataError(
            f"{text.name}: is a text file, and data.format is chat",
            "give JSON lines (.jsonl) or Parquet (.parquet) with messages, or prompt and completion",
        )
    texts = [f for f in files if f.kind == "text"]
    cut = _LARGEST_TEXT
    if len(texts) < _FEW_TEXTS:
        cut = min(max(sum(f.size for f in texts) // _TEXT_DOCUMENTS, _SMALLEST_TEXT), _LARGEST_TEXT)
    blocks: list[Block] = []
    gathered: list[Piece] = []
    size = 0
    for file in files:
        for piece in _cut(file, column, cut):
            gathered.append(piece)
            size += piece.bytes
            if size >= block_bytes:
                blocks.append(Block(len(blocks), tuple(gathered)))
                gathered, size = [], 0
    if gathered:
        blocks.append(Block(len(blocks), tuple(gathered)))
    return blocks


def _cut(file: SourceFile, column: str | None, text_bytes: int) -> Iterator[Piece]:
    if file.kind == "parquet":
        with parquet(file, column) as table:
            metadata = table.metadata
            for i in range(metadata.num_row_groups):
                yield Piece(file, i, i + 1, metadata.row_group(i).total_byte_size)
    elif not file.splittable:
        yield Piece(file, 0, file.size, file.size)
    else:
        step = text_bytes if file.kind == "text" else _LINES
        for start in range(0, file.size, step):
            stop = min(start + step, file.size)
            yield Piece(file, start, stop, stop - start)


@lru_cache(maxsize=8)
def filesystem(root: str) -> pafs.FileSystem:
    """The filesystem of a source's URI; "" is the local one."""
    return Storage(root).fs if root else pafs.LocalFileSystem()


def parquet(file: SourceFile, column: str | None) -> pq.ParquetFile:
    """Opens that file; it has `column`, if one is given. Raises DataError."""
    try:
        table = pq.ParquetFile(filesystem(file.root).open_input_file(file.path))
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{file.name}: not a readable Parquet file: {remote_filesystem.reason(error)}", "check the file"
        ) from error
    names = table.schema_arrow.names
    if column is not None and column not in names:
        raise missing_column(file.name, column, names)
    return table


def missing_column(where: str, column: str, names: Iterable[str]) -> DataError:
    """The error for a file, or a line of one, without the text column."""
    found = list(names)
    hint = f"choose one with --column (data.column): {', '.join(found) or 'none at all'}"
    if "messages" in found or {"prompt", "completion"} <= set(found):
        hint = "if these are conversations, set data.format: chat (--format chat)"
    return DataError(f'{where}: no column "{column}"', hint)


def code_of(source: str) -> str:
    """A hash of the module's file that `source` (records) names: changed code may give other documents.

    Raises DataError if there is no such module.
    """
    module = source.partition(":")[0]
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    except Exception as error:  # raised by the parent package
        raise _user_error(source, error) from error
    if spec is None:
        raise DataError(f"source {source}: no module {module!r}", "run from the folder that holds it, or install it")
    path = Path(spec.origin or "")
    return xxhash.xxh3_128_hexdigest(path.read_bytes()) if path.is_file() else ""
