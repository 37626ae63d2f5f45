"""The newest reading of each rank, passed to the agent through a file in shared memory."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from raydist.ipc import mailbox
from raydist.ipc.mailbox import Mailbox


def test_an_agent_reads_its_own_node_s_ranks(tmp_path: Path) -> None:
    """An agent reads the newest complete row of each rank of its node and run; at the end no file is left."""
    run, other = str(tmp_path / "a"), str(tmp_path / "b")
    mailboxes = {
        (uri, node, rank): Mailbox(uri, node, rank) for uri in (run, other) for node in "xy" for rank in (0, 1)
    }
    for (uri, node, rank), made in mailboxes.items():
        made.write({"run": uri, "node": node, "rank": rank, "step": 1})
        made.write({"run": uri, "node": node, "rank": rank, "step": 2})
    assert list(mailbox.read(run, "x")) == [{"run": run, "node": "x", "rank": r, "step": 2} for r in (0, 1)]
    mailbox.folder(run).joinpath("x-00002.json").write_text('{"torn')
    assert len(list(mailbox.read(run, "x"))) == 2
    mailbox.clear(run, "x")
    assert list(mailbox.read(run, "x")) == []
    assert len(list(mailbox.read(run, "y"))) == 2
    for made in mailboxes.values():
        made.close()
    assert not mailbox.folder(run).exists()
    assert not mailbox.folder(other).exists()


def test_who_comes_while_the_last_one_leaves(tmp_path: Path) -> None:
    """If the last user deletes the folder before another writes, the folder is created again."""
    run = str(tmp_path)
    leaves, comes = Mailbox(run, "x", 0), Mailbox(run, "x", 1)
    leaves.write({"rank": 0})
    leaves.close()
    assert not mailbox.folder(run).exists()
    comes.write({"rank": 1})
    assert list(mailbox.read(run, "x")) == [{"rank": 1}]
    comes.close()


def test_what_another_user_could_have_put_there_is_not_written_to(tmp_path: Path) -> None:
    """Because the folder's name can be guessed and /dev/shm is world-writable, a link of that name is refused."""
    place = mailbox.folder(str(tmp_path))
    place.symlink_to(tmp_path)
    try:
        with pytest.raises(OSError, match="not this user's folder"):
            Mailbox(str(tmp_path), "x", 0)
    finally:
        place.unlink()


def test_what_killed_runs_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only stale mailboxes are deleted: not a fresh one, not one whose rank is alive, and nothing behind a link of that name."""
    monkeypatch.setattr(mailbox, "SHM", tmp_path)
    stale, fresh, slow = (Mailbox(name, "x", 0) for name in ("stale", "fresh", "slow"))
    ended = subprocess.Popen(["true"])
    ended.wait()
    aside = tmp_path / "aside"
    aside.mkdir()
    (aside / "x-00000.json").write_text("{}")
    mailbox.folder("link").symlink_to(aside)
    for made, pid in ((stale, ended.pid), (fresh, ended.pid), (slow, os.getpid())):
        made.write({"rank": 0, "pid": pid})
    old = time.time() - mailbox.STALE_S - 1
    for place in (mailbox.folder("stale"), mailbox.folder("slow"), aside):
        os.utime(place, (old, old))
    mailbox.clear_stale()
    assert not mailbox.folder("stale").exists()
    assert [row["pid"] for row in mailbox.read("fresh", "x")] == [ended.pid]
    assert [row["pid"] for row in mailbox.read("slow", "x")] == [os.getpid()]
    assert (aside / "x-00000.json").exists()
    stale.write({"rank": 0, "step": 2})
    assert list(mailbox.read("stale", "x")) == [{"rank": 0, "step": 2}], "its rank was only stopped"
