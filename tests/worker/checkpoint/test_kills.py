"""The writer dies at every single storage operation of a save: a checkpoint is complete or does not exist."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("kills.py")


@pytest.mark.parametrize("death", ["kill", "power"])
def test_death_at_every_operation(tmp_path: Path, death: str) -> None:
    """SIGKILL, or a power cut that loses all unflushed data: every existing manifest is complete, one always exists, its state is
    the old or the new one, the new one from its rename on, and the next save works."""
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), death], capture_output=True, text=True, timeout=250, check=False
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout.splitlines()[-1])
    ops = [row["op"] for row in rows]
    for row in rows:
        assert row["ended"] == -signal.SIGKILL, row
        assert row["problems"] == [], row
        assert row["whole"], row
        assert row["step"] == row["committed"][-1]
        assert row["left"] == ["step-00000003"], "the next save sweeps what the dead one left"
    # Shards are flushed and renamed before the manifest is begun; the manifest is flushed before its rename.
    last_shard = max(i for i, op in enumerate(ops) if "shard" in op and "delete" not in op)
    assert ops[last_shard].startswith("rename")
    assert ops[last_shard + 1] == "fsync folder"
    assert last_shard < ops.index("create MANIFEST") < ops.index("fsync MANIFEST") < ops.index("rename MANIFEST")
    assert ops.index("fsync shard") < ops.index("rename shard")
    steps = [row["step"] for row in rows]
    assert all(a <= b for a, b in pairwise(steps)), "once it is there it stays"
    # At index i the process dies just before operation i.
    committed = ops.index("rename MANIFEST") + 1 + (death == "power")
    assert steps == [1] * committed + [2] * (len(steps) - committed)
    assert "delete MANIFEST" in ops[committed:], "the old one goes only after the new one is there"
