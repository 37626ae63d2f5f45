"""A checkpoint at a user's request: asks the run, and waits until it is committed. For `raydist checkpoint now` and the dashboard.

Runs in: a user's process with access to the run's folder. Never imports ray or torch.
"""

from __future__ import annotations

import time

from raydist.errors import SaveFailed, UsageError
from raydist.records import Event
from raydist.run import requests
from raydist.run.directory import RunDir
from raydist.run.log import read_events
from raydist.run.status import read_state

POLL_S = 0.5


def save_now(run: RunDir, timeout_s: float, by: str) -> int:
    """Has a checkpoint saved after the step that is trained now, or once the save in flight has ended. Returns its step, once it is
    committed. `by`: who asks.

    Raises UsageError if the run does not train, SaveFailed if the save has failed or has not ended in time.
    """
    state = read_state(run)
    if state["status"] != "running":
        raise UsageError(f"run {run.name} is {state['status']}", "only a run that is training saves checkpoints")
    reached, newest, before = int(state.get("step") or 0), run.newest_step(), len(read_events(run))
    request = requests.ask_checkpoint(run, timeout_s, by)
    try:
        while True:
            status = read_state(run)["status"]  # first: once a run has ended, it saves nothing more
            if (step := run.newest_step()) > newest and step >= reached:
                return step
            failed = [e for e in read_events(run)[before:] if e.kind == "checkpoint_failed" and _ends(e, reached)]
            if failed:
                raise SaveFailed(
                    f"step {failed[-1].data['step']}: the checkpoint was not saved: {failed[-1].data['cause']}",
                    "ask again when that is over",
                )
            if status != "running":
                raise SaveFailed(f"run {run.name} is now {status}, without a newer checkpoint", "its events say why")
            if time.time() > request.until:
                raise SaveFailed(
                    f"run {run.name} has not saved a checkpoint in {timeout_s:g} s",
                    "its steps may take longer: wait longer",
                )
            time.sleep(POLL_S)
    finally:
        requests.withdraw(run, request)


def _ends(failed: Event, reached: int) -> bool:
    """Whether a failure ends the wait. Not if it is of a save before the request, or of a step that was skipped for that save."""
    return not failed.data.get("skipped") and int(failed.data["step"]) >= reached
