"""Faults that the driver injects."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RpcError

from raydist import faults
from raydist.cluster.run import fault_injector
from raydist.cluster.run.fault_injector import DriverInjector
from raydist.faults import Drain, KillDriver
from raydist.run.directory import RunDir


class Monitor:
    """What a driver sends to its monitor."""

    def __init__(self) -> None:
        self.pushed: list[str] = []
        self.notes: list[str] = []

    def push(self, event: Any) -> None:
        self.pushed.append(event.kind)

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_head_that_is_lost_when_a_fault_is_due(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver goes on, to find out elsewhere that its head is lost: the fault is noted as not injected, without an event.
    The rank does not wait for it. Nor has it happened for the next driver, which records those that killed a driver."""

    def lost(*_: Any) -> list[str]:
        raise RpcError("Timed out while waiting for GCS to become available.")

    monkeypatch.setattr(fault_injector, "drain", lost)
    run, monitor, asked = RunDir(tmp_path), Monitor(), [Drain(rank=0, step=3)]
    injector = DriverInjector(run, monitor, "127.0.0.1:1", asked)  # type: ignore[arg-type]
    name = faults.note(faults.names(asked)[0], 0, 1)
    body = {"fault": "drain", "by": "driver", "rank": 0, "step": 3, "attempt": 1, "at": time.time(), "node_ip": "127.0.0.1",
            "asked": asked[0].model_dump(mode="json")}  # fmt: skip
    run.storage.write(name, json.dumps(body).encode())
    injector.look()
    injector.look()
    assert monitor.pushed == []
    assert monitor.notes == [
        "the fault drain could not be injected: Timed out while waiting for GCS to become available."
    ]
    assert run.storage.size(faults.done(name)) is not None
    killed = faults.note(faults.names([KillDriver(rank=0, step=4)])[0], 0, 1)
    run.storage.write(killed, json.dumps({**body, "fault": "kill_driver", "step": 4}).encode())
    following = DriverInjector(run, monitor, "127.0.0.1:1", asked)  # type: ignore[arg-type]
    following.look()
    assert (monitor.pushed, len(monitor.notes)) == (["fault"], 1)
    following.say_what_is_missing()
    assert len(monitor.notes) == 1
