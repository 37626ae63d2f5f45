"""The run's monitor as an actor on a private Ray: it needs no CPU, the driver owns it, and it is restarted after a kill."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from raydist.cluster.session import Session
from raydist.observe.monitor_actor import start_monitor
from raydist.run.directory import RunDir
from raydist.run.log import read_events, read_steps
from raydist.run.status import last_word, read_state
from tests.observe.conftest import pid

Rows = Callable[..., list[dict[str, Any]]]
Push = Callable[[Any, list[dict[str, Any]]], None]


def test_monitor_as_an_actor(private_ray: Session, run: RunDir, rows: Rows) -> None:
    """A whole run through the handle, while a task holds all CPUs; the state names this process as the driver."""
    monitor = start_monitor(run.uri, interval_s=60.0)

    @ray.remote(num_cpus=private_ray.resources["CPU"])
    def train(watch: Any) -> Any:
        ray.get(watch.begin_attempt.remote(1, 1, 0))
        reply = ray.get(watch.push.remote(rows(range(1, 4)), []))
        ray.get(watch.flush.remote())
        return reply

    ray.get(monitor.command.remote("stop"))
    assert ray.get(train.remote(monitor)) == {"command": "stop"}
    assert read_steps(run)["step"].to_pylist() == [1, 2, 3]
    assert ray.get(monitor.snapshot.remote())["step"] == 3
    assert read_state(run)["driver"]["pid"] == os.getpid()
    ray.get(monitor.end.remote("finished"))
    assert read_state(run)["status"] == "finished"
    assert [e.kind for e in read_events(run)] == ["attempt_started", "ended"]


@pytest.mark.usefixtures("private_ray")
def test_a_killed_monitor_comes_back(run: RunDir, rows: Rows, push_until_it_is_back: Push) -> None:
    """After SIGKILL of its process, records that it had accepted are kept, stored or not; later pushes are accepted, and the
    run's state continues."""
    monitor = start_monitor(run.uri, interval_s=60.0)
    ray.get(monitor.begin_attempt.remote(1, 2, 0))
    ray.get(monitor.push.remote(rows(range(1, 4)), []))
    ray.get(monitor.flush.remote())
    before = last_word(run)
    ray.get(monitor.push.remote(rows(range(4, 6)), []))
    os.kill(pid(monitor), 9)
    push_until_it_is_back(monitor, rows(range(6, 8)))
    ray.get(monitor.end.remote("paused"))
    assert read_steps(run)["step"].to_pylist() == [1, 2, 3, 4, 5, 6, 7]
    state = read_state(run)
    assert (state["status"], state["step"], state["driver"]) == ("paused", 7, (before or {})["driver"])


@pytest.mark.usefixtures("private_ray")
def test_storage_that_cannot_be_written_reaches_the_driver(tmp_path: Path) -> None:
    """The first call raises, with the constructor's StorageError in its message."""
    (tmp_path / "file").write_text("")
    monitor = start_monitor(str(tmp_path / "file" / "run"))
    with pytest.raises(ray.exceptions.RayActorError, match="StorageError: cannot"):
        ray.get(monitor.snapshot.remote())
