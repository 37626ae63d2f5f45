"""The ranks of a replay: one that fails ends it, whatever the others wait for."""

from __future__ import annotations

import subprocess
import sys

from raydist.launch.replay import first_failed

WAITS = [sys.executable, "-c", "import sys; sys.stdin.read()"]


def test_the_first_rank_that_fails_is_told_at_once() -> None:
    """Rank 0 would wait for ever, rank 1 has ended well, rank 2 has failed. Without a failure all are waited for."""
    waiting = subprocess.Popen(WAITS, stdin=subprocess.PIPE)
    others = [subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"]) for code in (0, 3)]
    try:
        assert first_failed([waiting, *others]) == 2
        assert waiting.poll() is None
    finally:
        waiting.communicate()
    assert first_failed([waiting, others[0]]) is None
