"""One `raydist dashboard` for the tests here, as its own process, over a storage with a run, a hostile run and a sweep."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from raydist.run.directory import SPEC, RunDir
from raydist.run.driver_process import this_process
from raydist.run.lease import DriverLease
from raydist.run.rank_logs import name as log_name
from raydist.run.status import write_state
from raydist.run.sweep_directory import SweepDir
from raydist.spec.sweep import load_sweep
from tests.report import story
from tests.report.sweep.conftest import Swept, train

ROOT = Path(__file__).parents[2]
EVIL = "<img src=x onerror=owned=1>"
"""HTML as a name, in a spec and in the output of a rank: if any text became HTML, it would set `owned`."""
SWEEP = f"""
base: {ROOT / "jobs/quickstart.yaml"}
array: {{parameters: {{lr: [1e-4, 1e-3]}}}}
"""


@dataclass(frozen=True)
class Dashboard:
    """The running server. `home`: its storage; `url`: what it has printed."""

    home: Path
    url: str

    @property
    def address(self) -> str:
        """Without a path."""
        return self.url.partition("/?")[0]

    @property
    def port(self) -> int:
        return int(urlsplit(self.url).port or 0)

    @property
    def token(self) -> str:
        return self.url.partition("token=")[2]

    @property
    def cookie(self) -> str:
        return f"raydist-{urlsplit(self.url).port}={self.token}"

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        """Status, headers and body of one request, with the cookie unless another one is given. `_` in names becomes `-`."""
        place = urlsplit(self.url)
        connection = http.client.HTTPConnection(str(place.hostname), place.port, timeout=300)
        sent = {"Cookie": self.cookie, **{name.replace("_", "-"): value for name, value in headers.items()}}
        connection.request(method, path, headers=sent)
        answer = connection.getresponse()
        found = answer.status, {name.title(): value for name, value in answer.getheaders()}, answer.read().decode()
        connection.close()
        return found


LOST_AFTER_S = 86_400.0
"""Of the servers here: `running` writes one heartbeat, and on a busy machine minutes may pass until a test has seen its pages."""
_SERVE = [
    sys.executable, "-c",
    f"from raydist.run import driver_process; driver_process.LOST_AFTER_S = {LOST_AFTER_S}; "
    "from raydist.__main__ import main; main()",
    "dashboard",
]  # fmt: skip


def running(run: RunDir, step: int, pid: int | None = None) -> None:
    """The state of a run whose driver is that process, or this one."""
    state = {"status": "running", "heartbeat_at": time.time(), "driver": this_process(pid), "step": step}
    write_state(run, {**state, "attempt": 2, "world_size": 2, "loss": 1.0})


@contextmanager
def acting(folder: Path) -> Iterator[tuple[Dashboard, RunDir, DriverLease]]:
    """A dashboard with --allow-actions over a run `live`, which this process drives at step 7, and a run `over`; with the driver's
    lease."""
    run = story.story(RunDir(folder / "runs" / "live"))
    story.story(RunDir(folder / "runs" / "over"))
    command = [*_SERVE, str(folder / "runs"), "--port", "0", "--allow-actions"]
    environment = {**os.environ, "RAYDIST_CACHE": str(folder / "cache")}
    with (
        DriverLease(run) as lease,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server,
    ):
        assert server.stdout is not None
        running(run, 7)
        try:
            yield Dashboard(folder / "runs", server.stdout.readline().strip()), run, lease
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=300)


@pytest.fixture(scope="session")
def dashboard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    """Serves until the tests are over; then SIGTERM ends it with exit code 0, and it has printed no error."""
    folder = tmp_path_factory.mktemp("dashboard")
    home = folder / "runs"
    story.story(RunDir(home / "base"))
    evil = story.story(RunDir(home / EVIL))
    evil.storage.write(SPEC, f"name: x\ntrain: {{steps: 200}}\nnote: '{EVIL}'\n".encode())
    evil.storage.write(log_name(1, 0), b"of the first\n")
    evil.storage.write(log_name(2, 0), f"{EVIL}\n<script>owned=1</script>\n\x1b[31mred\n".encode())
    (home / "secret").mkdir()
    (folder / "outside").mkdir()
    story.story(RunDir(folder / "outside" / "private"))
    (home / "linked").symlink_to(folder / "outside" / "private")
    (folder / "tuned.yaml").write_text(SWEEP)
    swept = Swept(SweepDir(home / "tuned"), load_sweep(folder / "tuned.yaml"))
    train(swept.folder.run(swept.cells[0].id), swept.cells[0], [5.0, 4.0], 2.5)
    swept.finish(0, 2.5)
    swept.finish(1, 2.25)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAYDIST_CACHE": str(folder / "cache")}
    command = [*_SERVE, str(home), "--port", "0"]
    with (folder / "stderr").open("w+") as errors:
        server = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert server.stdout is not None
        try:
            yield Dashboard(home, server.stdout.readline().strip())
        finally:
            server.send_signal(signal.SIGTERM)
            ended = server.wait(300)
            server.stdout.close()
        assert [*(folder / "cache" / "dashboards").iterdir()] == []
        errors.seek(0)
        assert (ended, errors.read().splitlines()[1:]) == (0, [])
