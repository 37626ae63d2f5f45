"""raydist.observe.warm_monitors on a private Ray: a monitor that was started before its run works like any other."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from raydist.observe.warm_monitors import WarmMonitor, WarmMonitors
from raydist.run.directory import ATTEMPTS, RunDir
from raydist.run.log import read_steps
from raydist.run.status import last_word, read_state
from tests.observe.conftest import pid

Rows = Callable[..., list[dict[str, Any]]]
Push = Callable[[Any, list[dict[str, Any]]], None]
pytestmark = pytest.mark.usefixtures("private_ray")


def begun(folder: Path) -> RunDir:
    """The folder of a run that a driver has begun."""
    (folder / ATTEMPTS).mkdir(parents=True)
    return RunDir(folder)


def test_one_is_ready_and_becomes_the_run_s(tmp_path: Path, rows: Rows) -> None:
    """The prepared actor takes the run with its folder, exporters and driver. At most one actor waits, none is started unless
    needed, and the next run gets another one."""
    wanted = [False]
    monitors = WarmMonitors(tmp_path, lambda: wanted[0])
    monitors.prepare()
    assert monitors._ready is None
    wanted[0] = True
    monitors.prepare()
    ready = monitors._ready
    monitors.prepare()
    assert monitors._ready is ready
    run = begun(tmp_path / "run")
    mine = monitors.get(run.uri, [{"name": "jsonl", "options": {"path": str(tmp_path / "out.jsonl")}}], {"name": "x"})
    assert mine is ready
    ray.get(mine.begin_attempt.remote(1, 1, 0))
    ray.get(mine.push.remote(rows(range(1, 4)), []))
    assert read_state(run)["driver"]["pid"] == os.getpid()
    other = monitors.get(begun(tmp_path / "other").uri, [], {})
    assert other._actor_id != mine._actor_id
    for monitor in (mine, other):
        ray.get(monitor.end.remote("finished"))
    assert read_steps(run)["step"].to_pylist() == [1, 2, 3]
    assert read_state(run)["status"] == "finished"
    assert (tmp_path / "out.jsonl").read_text().count('"type": "step"') == 3
    monitors.end()


def test_one_that_was_killed_comes_back_as_the_run_s(tmp_path: Path, rows: Rows, push_until_it_is_back: Push) -> None:
    """After SIGKILL during its run Ray restarts the actor, and it continues that run."""
    monitors, run = WarmMonitors(tmp_path), begun(tmp_path / "run")
    monitors.prepare()
    mine = monitors.get(run.uri, [], {})
    ray.get(mine.begin_attempt.remote(1, 2, 0))
    ray.get(mine.push.remote(rows(range(1, 4)), []))
    ray.get(mine.flush.remote())
    before = last_word(run)
    os.kill(pid(mine), 9)
    push_until_it_is_back(mine, rows(range(4, 6)))
    ray.get(mine.end.remote("paused"))
    assert read_steps(run)["step"].to_pylist() == [1, 2, 3, 4, 5]
    assert (last_word(run) or {})["driver"] == (before or {})["driver"]
    monitors.end()


def test_one_that_cannot_take_the_run_is_not_missed(tmp_path: Path) -> None:
    """If the prepared actor has died, the run gets a new monitor."""
    monitors, run = WarmMonitors(tmp_path), begun(tmp_path / "run")
    monitors.prepare()
    ready = monitors._ready
    ray.kill(ready)
    mine = monitors.get(run.uri, [], {})
    assert mine._actor_id != ready._actor_id
    ray.get(mine.begin_attempt.remote(1, 1, 0))
    assert read_state(run)["status"] == "running"
    ray.get(mine.end.remote("paused"))
    monitors.end()


def test_one_that_nobody_takes_ends(tmp_path: Path) -> None:
    """`end` removes an unused actor's process and folder, and later calls start no other."""
    monitors = WarmMonitors(tmp_path)
    monitors.prepare()
    ready = monitors._ready
    assert [folder.stat().st_mode & 0o777 for folder in tmp_path.iterdir()] == [0o700]
    monitors.end()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(ready.command.remote(None), timeout=240)
    assert list(tmp_path.iterdir()) == []
    monitors.prepare()
    assert monitors._ready is None


def test_what_another_user_has_put_there_is_not_used(tmp_path: Path) -> None:
    """A link in place of the slot is not read (its exporters would be imported), and one in place of its unfinished file not
    written."""
    arguments = {"run_uri": str(tmp_path / "run"), "exporters": [], "spec": {}}
    theirs = tmp_path / "theirs"
    theirs.write_text(json.dumps(arguments))
    (tmp_path / "1.json").symlink_to(theirs)
    (tmp_path / "2.part").symlink_to(tmp_path / "not there")
    with pytest.raises(OSError, match="1.json"):
        WarmMonitor(str(tmp_path / "1.json"))
    with pytest.raises(FileExistsError):
        WarmMonitor(str(tmp_path / "2.json")).take(arguments)
    assert not (tmp_path / "not there").exists()
