"""Encodes tables as Parquet, for files that are rewritten many times while they grow.

Runs anywhere. Must not import ray or torch.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

_FEW_ROWS = 1000
"""Up to this many rows, writing with lz4 takes less time than zstd's initialisation, which it does once per column."""


def encode(table: pa.Table) -> memoryview:
    """The whole file: fast to encode for few rows, small for many."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd" if table.num_rows > _FEW_ROWS else "lz4", use_dictionary=False)
    return memoryview(sink.getvalue())
