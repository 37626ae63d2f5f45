"""Stores tables as Parquet, in files that are rewritten many times while they grow.

Runs anywhere. Must not import ray or torch.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from raydist.storage import Storage

_FEW_ROWS = 1000
"""Up to this many rows, writing with lz4 takes less time than zstd's initialisation, which it does once per column."""


def store(storage: Storage, name: str, table: pa.Table) -> None:
    """The whole file, in place of an earlier one: fast to encode for few rows, small for many. Raises StorageError."""
    sink = pa.BufferOutputStream()
    try:
        pq.write_table(table, sink, compression="zstd" if table.num_rows > _FEW_ROWS else "lz4", use_dictionary=False)
        storage.write(name, memoryview(sink.getvalue()))
    finally:
        del sink
        # Arrow's allocator keeps freed pages for each thread, and only that thread can return them: without this, each thread of a
        # monitor would hold as many as the largest file that it has encoded took.
        pa.default_memory_pool().release_unused()
