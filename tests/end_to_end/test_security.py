"""A live run against docs/explanation/security.md, and against a second user of the same host.

Over a minute: it starts a Ray of its own, and one run on it.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raydist.checkpoint.memory_layout import SHM
from raydist.ipc import mailbox
from tests import needs, planted, shared_files
from tests.end_to_end.test_memory import until_copied
from tests.sockets import ATTACK, opened, unexpected


@pytest.fixture
def tmp() -> Iterator[Path]:
    """A folder in place of /tmp: short, and writable for all users. What is in it is the run's, or planted."""
    with tempfile.TemporaryDirectory(prefix="rd-", dir="/tmp") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


@contextlib.contextmanager
def without_import(folder: Path) -> Iterator[None]:
    """With modules in the folder that have the names of others. None of them is imported in the block."""
    files = planted.plant(folder)
    try:
        yield
        assert planted.imported(folder) == []
    finally:
        for file in (*files, *folder.glob("*.imported")):
            file.unlink()


def test_a_live_run_and_another_user_of_the_host(project: Any, tmp: Path, tmp_path: Path) -> None:
    """What it opens and stores is what the page says; the other user reads, changes, connects to and signals nothing, and the run
    goes on. It opens, follows and deletes nothing that the other user has put where it cleans at its start. Modules in the working
    directory replace none of Python's or of the installed ones; the user's own model is found there."""
    needs.require("second user")
    before = set(SHM.iterdir())
    with shared_files.planted(tmp, tmp_path / "private") as theirs, without_import(project.root):
        foreign = shared_files.facts([*theirs, *(tmp_path / "private").iterdir()])
        process = project.start(
            "train",
            "job.yaml",
            "--name",
            "held",
            "--set",
            "recovery.snapshot_every=2",
            *project.options("held", [], hold=11),
            env={"TMPDIR": str(tmp)},
        )
        copies = until_copied(process)
        rows, what = opened(process.processes())
        assert unexpected((name, address.replace(f"{tmp}/", "/tmp/")) for name, address in rows) == []
        assert ("rank", "node") in rows
        assert ("driver", f"{copies}/bell") in rows
        assert any(name == "ray::" and address.startswith("@raydist-") for name, address in rows)
        session = Path(next(path for path in what["unix"] if path.endswith("/zygote"))).parent
        run = project.runs / "held"
        new = {path for path in SHM.glob("raydist-*") if path not in before} | {*tmp.iterdir()}
        stored = (new | shared_files.in_shared_memory(process.processes())) - {*theirs}
        assert shared_files.unexpected(stored, run) == []
        journals = [path for path in stored if "-journal-" in path.name]
        assert {session, copies, mailbox.folder(str(run)), *journals} <= stored
        assert journals
        paths = [
            *stored,
            run,
            session / "r",
            session / "zygote",
            copies / "lock",
            run / "spec.yaml",
            run / "state.json",
        ]
        asked = {**{name: sorted(found) for name, found in what.items()}, "paths": [str(path) for path in paths]}
        attack = subprocess.run(
            [sys.executable, "-c", ATTACK, json.dumps(asked)], capture_output=True, text=True, timeout=120, check=False
        )
        assert attack.returncode == 0, attack.stderr
        assert json.loads(attack.stdout) == []
        assert all(path.exists() for path in (session, copies, run, *journals, *paths[len(stored) :]))
        (project.root / "marks" / "held" / "go").touch()
        _, told = process.communicate(timeout=240)
        assert process.returncode == 0, told
        assert shared_files.facts(foreign) == foreign
        assert {*tmp.iterdir()} <= {*theirs}, "it leaves nothing"
    assert project.show("held")["steps"] == 12
    assert len(project.show("held")["attempts"]) == 1, "it was not even restarted"
    assert (run / "logs" / "ray").is_dir()
    assert shared_files.unexpected([], run) == []
