"""A live run against docs/explanation/security.md, and against a second user of the same host.

Over a minute: it starts a Ray of its own, and one run on it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from raydist.ipc import mailbox
from tests import needs
from tests.end_to_end.test_memory import until_copied
from tests.sockets import ATTACK, opened, unexpected


def test_a_live_run_and_another_user_of_the_host(project: Any) -> None:
    """What it opens is what the page says; the other user reads, changes, connects to and signals nothing, and the run goes on."""
    needs.require("second user")
    process = project.warm_start(
        "train",
        "job.yaml",
        "--name",
        "held",
        "--set",
        "recovery.snapshot_every=2",
        *project.options("held", [], hold=11),
    )
    copies = until_copied(process)
    rows, what = opened(process.processes())
    assert unexpected(rows) == []
    assert ("rank", "node") in rows
    assert ("driver", f"{copies}/bell") in rows
    assert any(name == "ray::" and address.startswith("@raydist-") for name, address in rows)
    session = Path(next(path for path in what["unix"] if path.endswith("/zygote"))).parent
    run = project.runs / "held"
    board = mailbox.folder(str(run))
    journals = [
        p for p in Path("/dev/shm").glob("raydist-*-journal-*") if f'"pid": {process.inner},' in p.read_text()[:500]
    ]
    modes = {path: path.stat().st_mode & 0o777 for path in (session, copies, board, run, *journals)}
    assert journals
    assert set(modes.values()) <= {0o700, 0o600}, modes
    paths = [*modes, session / "r", session / "zygote", copies / "lock", run / "spec.yaml", run / "state.json"]
    asked = {**{name: sorted(found) for name, found in what.items()}, "paths": [str(path) for path in paths]}
    attack = subprocess.run(
        [sys.executable, "-c", ATTACK, json.dumps(asked)], capture_output=True, text=True, timeout=120, check=False
    )
    assert attack.returncode == 0, attack.stderr
    assert json.loads(attack.stdout) == []
    assert all(path.exists() for path in paths)
    (project.root / "marks" / "held" / "go").touch()
    _, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    assert project.show("held")["steps"] == 12
    assert len(project.show("held")["attempts"]) == 1, "it was not even restarted"
    ray_logs = run / "logs" / "ray"
    readable = [p for p in run.rglob("*") if ray_logs not in p.parents and p.stat().st_mode & 0o077]
    assert readable == []
