"""raydist.dashboard.beside: the page of a run in a process beside its driver."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from raydist.dashboard import beside as module
from raydist.dashboard.announced import link
from raydist.dashboard.beside import beside
from raydist.run.directory import RunDir
from tests.dashboard.conftest import Dashboard
from tests.report import story


def test_the_page_is_served_while_the_run_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is known at once, and its token opens this page; the process has the lowest priority, is found by other commands,
    has printed nothing, and is gone after the run."""
    monkeypatch.setenv("RAYDIST_CACHE", str(tmp_path / "cache"))
    run, notes = story.story(RunDir(tmp_path / "runs" / "a run")), list[str]()
    with beside(run, notes.append):
        (note,) = notes
        page = Dashboard(tmp_path / "runs", note.rpartition(" ")[2])
        path, _, token = page.url.removeprefix(f"http://127.0.0.1:{page.port}").partition("?token=")
        assert path == "/run/0/a%20run"
        assert page.ask(path, Cookie="")[0] == 401
        assert page.ask(f"{path}?token=x", Cookie="")[0] == 401
        status, headers, body = page.ask(f"{path}?token={token}", Cookie="")
        assert (status, headers["Set-Cookie"].partition(";")[0]) == (200, page.cookie)
        assert 'content="0;url=/run/0/a%20run"' in body
        assert "Set-Cookie" not in page.ask(f"//evil.example/?token={token}", Cookie="")[1]
        status, _, body = page.ask(path)
        assert (status, "<title>a run" in body) == (200, True)
        assert link(run) == f"http://127.0.0.1:{page.port}{path}"
        (pid,) = [int(file.stem) for file in (tmp_path / "cache" / "dashboards").iterdir()]
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert not Path(f"/proc/{pid}").exists()
    assert link(run) is None
    assert run.storage.read(module.LOG) == b""


def test_its_end_is_not_the_run_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed: the driver does not notice. A port that is taken is replaced; no port at all is one note."""
    monkeypatch.setenv("RAYDIST_CACHE", str(tmp_path / "cache"))
    run, notes = story.story(RunDir(tmp_path / "runs" / "base")), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(module, "PORT", taken.getsockname()[1])
        with beside(run, notes.append):
            page = Dashboard(tmp_path / "runs", notes[0].rpartition(" ")[2])
            assert page.port != taken.getsockname()[1]
            assert page.ask("/run/0/base")[0] == 200
            (pid,) = [int(file.stem) for file in (tmp_path / "cache" / "dashboards").iterdir()]
            os.kill(pid, signal.SIGKILL)
    assert len(notes) == 1
    monkeypatch.setattr(module, "HOST", "192.0.2.1")  # of no host
    with beside(run, notes.append):
        pass
    assert notes[1].startswith("raydist: no dashboard: Cannot assign requested address")
    assert notes[1].endswith("; training continues without it")
