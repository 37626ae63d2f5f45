"""Tables as the bytes of a Parquet file, for files that are written again and again while they grow.

Runs anywhere. Must not import ray or torch.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

_FEW_ROWS = 1000
"""So many rows or fewer take less time to write with lz4 than zstd takes to begin, once for each column."""


def encode(table: pa.Table) -> memoryview:
    """The whole file. Of few rows it is quick to make, of more it is small."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd" if table.num_rows > _FEW_ROWS else "lz4", use_dictionary=False)
    return memoryview(sink.getvalue())
