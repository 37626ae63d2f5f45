"""How a supervisor handles stop requests and a silent head, without Ray. tests/end_to_end/test_trace.py tests a real stop."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from raydist.cluster.run.head_outage import HeadOutage
from raydist.cluster.run.monitor_client import MonitorClient
from raydist.cluster.run.request import Ending
from raydist.cluster.run.restart_loop import RestartLoop
from raydist.cluster.run.stop_request import StopRequest
from raydist.cluster.run.supervisor import Supervisor
from raydist.run.directory import RunDir


@pytest.mark.parametrize(
    ("asked", "known", "last", "again"),
    [
        ("user", None, False, True),
        ("resize", None, False, True),
        ("user", "stop", False, False),
        ("", None, False, False),
        ("user", None, True, False),
    ],
)
def test_a_restarted_monitor_gets_the_stop_again(
    asked: str, known: str | None, last: bool, again: bool, tmp_path: Path
) -> None:
    """A restarted monitor has lost the stop command, so it is sent again; not if it is known, and not after the run's end."""
    commands: list[str | None] = []
    stop_request = StopRequest()
    if asked == "user":
        stop_request.add(signal.SIGINT)
    elif asked:
        stop_request.want(asked, True)
    snapshot = {"next": 1, "events": [], "record": None, "command": known}
    none: Any = SimpleNamespace()
    supervisor = Supervisor(
        RunDir(tmp_path),
        view=SimpleNamespace(update=lambda snapshot: None),  # type: ignore[arg-type]
        monitor=SimpleNamespace(  # type: ignore[arg-type]
            snapshot=lambda seen: snapshot, command=lambda present: commands.append(present())
        ),
        stop_request=stop_request,
        elasticity=none,
        attempts=none,
        outage=HeadOutage(None, 40.0, RunDir(tmp_path)),
        injector=None,
        slot=none,
    )
    supervisor._show(last)
    assert commands == (["stop"] if again else [])


def test_stop_requests_add_up() -> None:
    """Signals are kept in order; a wait ends with the first one; a cancelled request stays cancelled. The driver's own reasons are
    no request, and of two of them one may end before the other."""
    stop_request = StopRequest()
    assert (stop_request.signals, stop_request.cancelled, stop_request.command()) == ((), False, None)
    seen = []
    for why, wanted in (("resize", True), ("head", True), ("head", False), ("resize", False)):
        stop_request.want(why, wanted)
        seen.append(stop_request.command())
    assert seen == ["stop", "stop", "stop", None]
    assert not stop_request.wait(0.0)
    waiting = threading.Thread(target=stop_request.wait, args=(60.0,))
    waiting.start()
    stop_request.add(signal.SIGTERM)
    waiting.join(240)
    assert not waiting.is_alive()
    stop_request.add(signal.SIGINT, cancel=True)
    stop_request.add(signal.SIGINT)
    assert stop_request.signals == (signal.SIGTERM, signal.SIGINT, signal.SIGINT)
    assert stop_request.cancelled
    assert stop_request.command() == "stop"


def test_no_call_waits_for_a_monitor_that_is_lost() -> None:
    """Neither for its answer nor for an error of Ray."""
    actor = SimpleNamespace(snapshot=SimpleNamespace(remote=lambda seen: object()))
    assert MonitorClient(actor, lost=lambda: True).snapshot(0) is None


def test_a_silent_head(tmp_path: Path) -> None:
    """After half of the limit the ranks save a checkpoint, once; an answer withdraws that; after the whole limit the run ends."""
    head: Any = SimpleNamespace(
        address="10.0.0.1:6379",
        silent_s=0.0,
        dead=False,
        why=lambda s: f"Ray's head at 10.0.0.1:6379 has not answered for {s:.0f} s",
    )
    outage = HeadOutage(head, 40.0, RunDir(tmp_path))
    seen = []
    for seconds in (1.0, 21.0, 22.0, 1.0, 30.0, 41.0):
        head.silent_s = seconds
        seen.append((outage.look(), outage.silent))
    assert seen == [
        ("same", False), ("silent", True), ("same", True), ("answers", False), ("silent", True), ("gone", True)
    ]  # fmt: skip
    ending = outage.ending()
    assert ending is not None
    assert ending.status == "stopped"
    assert "Ray's head at 10.0.0.1:6379 has not answered for 41 s" in ending.cause


@pytest.mark.parametrize("then", ["answers", "stop", "dead"])
def test_a_run_waits_for_a_silent_head(then: str, tmp_path: Path) -> None:
    """Its ranks have ended with a checkpoint: it goes on once the head answers; it ends if it is to stop, or no head comes back."""
    head: Any = SimpleNamespace(
        address="10.0.0.1:6379", silent_s=21.0, dead=False, why=lambda s: "Ray's head", patience_s=0
    )
    outage, stop_request, none = HeadOutage(head, 40.0, RunDir(tmp_path)), StopRequest(), cast(Any, SimpleNamespace())
    request: Any = SimpleNamespace(spec=None)
    loop = RestartLoop(request, none, none, stop_request, outage, None, private=False, keeps=False)
    assert outage.look() == "silent"
    found: list[Ending | None] = []
    waiting = threading.Thread(target=lambda: found.append(loop._silent_head()))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    if then == "answers":
        head.silent_s = 0.0
        outage.look()
    elif then == "stop":
        stop_request.add(signal.SIGINT)
    else:
        head.dead = True
    waiting.join(240)
    assert [ending and ending.status for ending in found] == [None if then == "answers" else "stopped"]


def test_a_private_ray_has_no_outage(tmp_path: Path) -> None:
    """The head of a private Ray ends with the driver, so its silence is never an outage."""
    outage = HeadOutage(None, 40.0, RunDir(tmp_path))
    assert (outage.look(), outage.silent, outage.ending()) == ("same", False, None)
    outage.close()
