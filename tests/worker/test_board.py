"""The newest reading of each rank, from hand to hand through a file in memory."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from raydist.worker import board
from raydist.worker.board import Board


def test_an_agent_reads_its_own_node_s_ranks(tmp_path: Path) -> None:
    """The newest row of each, whole; not those of another node or another run; and nothing is left at the end."""
    run, other = str(tmp_path / "a"), str(tmp_path / "b")
    boards = {(uri, node, rank): Board(uri, node, rank) for uri in (run, other) for node in "xy" for rank in (0, 1)}
    for (uri, node, rank), made in boards.items():
        made.write({"run": uri, "node": node, "rank": rank, "step": 1})
        made.write({"run": uri, "node": node, "rank": rank, "step": 2})
    assert list(board.read(run, "x")) == [{"run": run, "node": "x", "rank": r, "step": 2} for r in (0, 1)]
    board.folder(run).joinpath("x-00002.json").write_text('{"torn')
    assert len(list(board.read(run, "x"))) == 2
    board.clear(run, "x")
    assert list(board.read(run, "x")) == []
    assert len(list(board.read(run, "y"))) == 2
    for made in boards.values():
        made.close()
    assert not board.folder(run).exists()
    assert not board.folder(other).exists()


def test_who_comes_while_the_last_one_leaves(tmp_path: Path) -> None:
    """The folder that was taken away under it is made again."""
    run = str(tmp_path)
    leaves, comes = Board(run, "x", 0), Board(run, "x", 1)
    leaves.write({"rank": 0})
    leaves.close()
    assert not board.folder(run).exists()
    comes.write({"rank": 1})
    assert list(board.read(run, "x")) == [{"rank": 1}]
    comes.close()


def test_what_another_user_could_have_put_there_is_not_written_to(tmp_path: Path) -> None:
    """The folder's name can be guessed, and /dev/shm is everybody's."""
    place = board.folder(str(tmp_path))
    place.symlink_to(tmp_path)
    try:
        with pytest.raises(OSError, match="not this user's folder"):
            Board(str(tmp_path), "x", 0)
    finally:
        place.unlink()


def test_what_killed_runs_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boards that nobody writes to, and they alone: no fresh one, none of a rank that lives, and nothing behind a link of that
    name."""
    monkeypatch.setattr(board, "SHM", tmp_path)
    stale, fresh, slow = (Board(name, "x", 0) for name in ("stale", "fresh", "slow"))
    ended = subprocess.Popen(["true"])
    ended.wait()
    aside = tmp_path / "aside"
    aside.mkdir()
    (aside / "x-00000.json").write_text("{}")
    board.folder("link").symlink_to(aside)
    for made, pid in ((stale, ended.pid), (fresh, ended.pid), (slow, os.getpid())):
        made.write({"rank": 0, "pid": pid})
    old = time.time() - board.STALE_S - 1
    for place in (board.folder("stale"), board.folder("slow"), aside):
        os.utime(place, (old, old))
    board.clear_stale()
    assert not board.folder("stale").exists()
    assert [row["pid"] for row in board.read("fresh", "x")] == [ended.pid]
    assert [row["pid"] for row in board.read("slow", "x")] == [os.getpid()]
    assert (aside / "x-00000.json").exists()
    stale.write({"rank": 0, "step": 2})
    assert list(board.read("stale", "x")) == [{"rank": 0, "step": 2}], "its rank was only stopped"
