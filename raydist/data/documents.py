"""The documents of a part of a corpus, validated: text is UTF-8, every line and row has the column.

Runs anywhere: in the preparing process, and in Ray Data's tasks. numpy and pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from raydist import remote_filesystem
from raydist.data import sources
from raydist.data.chat_template import Rendered
from raydist.data.conversations import Conversations, Where, check_schema, schema_of
from raydist.data.sources import Piece, SourceFile
from raydist.errors import DataError

Document = bytes | npt.NDArray[np.int64] | Rendered
"""UTF-8 text (or raw bytes of a user's own source), token ids, or a conversation."""

LONGEST_LINE = 1 << 30
"""Bytes of a line of JSON: one without an end would fill the memory."""
_CHUNK = 4 << 20
_ROWS, _BATCH_BYTES = 1024, 64 << 20
"""Most rows that are read at once from Parquet, and most bytes, by the mean of a row: documents may be long."""


def read(piece: Piece, column: str, chat: Conversations | None = None) -> Iterator[Document]:
    """The documents of a piece, in file order; empty ones and nulls are skipped. `chat`: rows are conversations.

    Raises DataError.
    """
    try:
        if chat is not None:
            yield from _conversations(piece, chat)
        elif piece.file.kind == "text":
            text = b"".join(_lines(piece))
            if text:
                yield _utf8(text, piece.file.name, lambda: _offset(piece))
        elif piece.file.kind == "jsonl":
            yield from _json_lines(piece, column)
        else:
            yield from _parquet(piece, column)
    except FileNotFoundError as error:
        raise DataError(
            f"{piece.file.name} does not exist any more", "do not change the sources during preparation"
        ) from error
    except (OSError, pa.ArrowException) as error:
        hint = remote_filesystem.remedy(piece.file.root, "check the file and its permissions")
        raise DataError(f"{piece.file.name} cannot be read: {remote_filesystem.reason(error)}", hint) from error


def of_record(record: Any, where: Where, *, raw: bool = False) -> Document | None:
    """Converts an item of a user's source or a Parquet row to a document; None if it is empty. Raises DataError, with the place.

    `raw` accepts bytes that are not UTF-8.
    """
    if record is None:
        return None
    if isinstance(record, str):
        try:
            return record.encode() or None
        except UnicodeEncodeError as error:
            raise DataError(f"{where()}: {error.reason}", "a lone surrogate is not text: clean the corpus") from error
    if isinstance(record, bytes):
        return (record if raw else _utf8(record, where(), lambda: 0)) or None
    try:
        ids = np.asarray(record)
        if ids.ndim == 1 and (not ids.size or np.issubdtype(ids.dtype, np.integer)):
            return ids.astype(np.int64) if ids.size else None
    except (ValueError, OverflowError):
        pass
    raise DataError(f"{where()}: a document has type {type(record).__name__}", "give str, bytes or a list of token ids")


def _utf8(text: bytes, name: str, offset: Callable[[], int]) -> bytes:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        at = offset() + error.start
        raise DataError(
            f"{name}: bad UTF-8: byte 0x{text[error.start]:02x} at offset {at} ({error.reason})",
            "convert it (iconv -f LATIN1 -t UTF-8), or leave it out with a glob such as 'DIR/**/*.txt'",
        ) from None
    return text


def _lines(piece: Piece) -> Iterator[bytes]:
    """The bytes of the lines that start in the piece, in chunks of any length."""
    file, filesystem = piece.file, sources.filesystem(piece.file.root)
    if not file.splittable:
        with filesystem.open_input_stream(file.path, compression="detect") as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
        return
    with filesystem.open_input_file(file.path) as stream:
        position = _line_start(stream, piece.start, file.size)
        stop = _line_start(stream, piece.stop, file.size)
        stream.seek(position)
        while position < stop:
            chunk = stream.read(min(_CHUNK, stop - position))
            if not chunk:
                raise DataError(
                    f"{file.name} has become shorter: {position} bytes, not {file.size}",
                    "do not change the sources during preparation",
                )
            position += len(chunk)
            yield chunk


def _offset(piece: Piece) -> int:
    """Position in the file at which the piece's first line begins."""
    if not piece.file.splittable:
        return 0
    with sources.filesystem(piece.file.root).open_input_file(piece.file.path) as stream:
        return _line_start(stream, piece.start, piece.file.size)


def _line_start(stream: pa.NativeFile, position: int, size: int) -> int:
    """Position of the first line that begins at `position` or later; `size` if there is none."""
    if position == 0 or position >= size:
        return min(position, size)
    stream.seek(position - 1)
    at = position - 1
    while chunk := stream.read(64 << 10):
        found = chunk.find(b"\n")
        if found >= 0:
            return int(at + found + 1)
        at += len(chunk)
    return size


def raw(document: Document) -> bytes:
    """A document as bytes, which two documents share only if they are equal."""
    if isinstance(document, Rendered):
        return document.text.encode() + json.dumps([document.spans, document.special]).encode()
    return document if isinstance(document, bytes) else document.astype("<i8").tobytes()


def _conversations(piece: Piece, chat: Conversations) -> Iterator[Document]:
    first: tuple[tuple[str, ...], Where] | None = None
    for where, row in _first_row(piece) if piece.start else ():
        first = schema_of(row, where), where
    for where, row in _json_rows(piece) if piece.file.kind == "jsonl" else _parquet_rows(piece):
        if first is None:
            first = schema_of(row, where), where
        check_schema(*first, row, where)
        yield chat.read(row, where)


def _first_row(piece: Piece) -> Iterator[tuple[Where, Any]]:
    """The first row of the piece's file: all of them have its schema."""
    start = Piece(piece.file, 0, 1, 0)
    return islice(_json_rows(start) if piece.file.kind == "jsonl" else _parquet_rows(start), 1)


def _json_lines(piece: Piece, column: str) -> Iterator[Document]:
    for where, row in _json_rows(piece):
        if column not in row:
            raise sources.missing_column(where(), column, row)
        document = of_record(row[column], lambda where=where: f'{where()}, column "{column}"')  # type: ignore[misc]
        if document is not None:
            yield document


def _json_rows(piece: Piece) -> Iterator[tuple[Where, Any]]:
    """The values of the lines that are not empty, each with its place for errors."""
    parts: list[bytes] = []  # of the line whose end is not read yet: joined once, however many chunks it has
    held, count = 0, 0
    for chunk in _lines(piece):
        first, *others = chunk.split(b"\n")
        parts.append(first)
        held += len(first)
        for line in others:
            count += 1
            yield from _json_line(b"".join(parts), piece, count)
            parts, held = [line], len(line)
        if held > LONGEST_LINE:
            raise DataError(
                f"{_where(piece, count + 1)}: a line of more than {LONGEST_LINE >> 20} MiB",
                "expected: one object per line",
            )
    yield from _json_line(b"".join(parts), piece, count + 1)


def _json_line(line: bytes, piece: Piece, number: int) -> Iterator[tuple[Where, Any]]:
    if not line.strip():
        return
    try:
        row = json.loads(line.decode("utf-8-sig" if number == 1 and piece.start == 0 else "utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{_where(piece, number)}: bad UTF-8: byte 0x{line[error.start]:02x} at column {error.start + 1}",
            "convert the file (iconv -f LATIN1 -t UTF-8), or leave it out",
        ) from None
    except json.JSONDecodeError as error:
        raise DataError(
            f"{_where(piece, number)}: not JSON: {error.msg} at column {error.colno}",
            "expected: one object per line",
        ) from None
    except RecursionError:
        raise DataError(f"{_where(piece, number)}: nested too deeply", "expected: one object per line") from None
    if not isinstance(row, dict):
        raise DataError(
            f"{_where(piece, number)}: {type(row).__name__}, not an object", "expected: one object per line"
        )
    yield partial(_where, piece, number), row


def _where(piece: Piece, number: int) -> str:
    """The file and the line number in it. Lines before the piece are counted only here, for the error message."""
    if piece.start:
        before = Piece(piece.file, 0, piece.start, 0)
        number += sum(chunk.count(b"\n") for chunk in _lines(before))
    return f"{piece.file.name}: line {number}"


def _parquet(piece: Piece, column: str) -> Iterator[Document]:
    file: SourceFile = piece.file
    with sources.parquet(file, column) as table:
        row = sum(table.metadata.row_group(i).num_rows for i in range(piece.start))
        for batch in _batches(piece, table, columns=[column]):
            values = batch.column(0)
            if pa.types.is_dictionary(values.type):
                values = values.dictionary_decode()
            # As bytes, so that invalid UTF-8 is reported by raydist, with its row.
            if pa.types.is_string(values.type):
                values = values.view(pa.binary())
            elif pa.types.is_large_string(values.type):
                values = values.view(pa.large_binary())
            for value in _plain(values):
                document = of_record(value, partial('{}: row {}, column "{}"'.format, file.name, row, column))
                row += 1
                if document is not None:
                    yield document


def _parquet_rows(piece: Piece) -> Iterator[tuple[Where, Any]]:
    with sources.parquet(piece.file, None) as table:
        row = sum(table.metadata.row_group(i).num_rows for i in range(piece.start))
        for batch in _batches(piece, table):
            for value in batch.to_pylist():
                yield partial("{}: row {}".format, piece.file.name, row), value
                row += 1


def _batches(piece: Piece, table: pq.ParquetFile, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    groups = range(piece.start, piece.stop)
    facts = [table.metadata.row_group(i) for i in groups]
    each = sum(group.total_byte_size for group in facts) // max(1, sum(group.num_rows for group in facts))
    rows = max(1, min(_ROWS, _BATCH_BYTES // max(1, each)))
    yield from table.iter_batches(batch_size=rows, row_groups=list(groups), columns=columns)


def _plain(values: pa.Array) -> Iterator[Any]:
    """One by one. Token ids stay arrays: as lists of Python's integers they take many times the memory and time."""
    for value in values:
        ids = value.values if isinstance(value, pa.ListScalar) and value.is_valid else None
        if ids is not None and pa.types.is_integer(ids.type) and not ids.null_count:
            yield ids.to_numpy()
        else:
            yield value.as_py()
