"""What a page may ask a run for, where the dashboard was started with --allow-actions: its end, a checkpoint, a trace.

Runs in: the dashboard's threads. Each is a request in the run's folder, as those of `raydist stop`, `raydist checkpoint now` and
`raydist trace`; the run writes into its events who has asked.
"""

from __future__ import annotations

import getpass
import socket
import sys
import threading
from collections.abc import Callable

from raydist.checkpoint.on_request import save_now
from raydist.errors import RaydistError, UsageError
from raydist.report.html.elements import Markup, tag
from raydist.report.html.page import section
from raydist.report.tracing import record
from raydist.run.directory import RunDir
from raydist.run.lease import ask_stop, newest_driver
from raydist.run.status import read_state

STEPS, WAIT_S = 3, 600.0
ACTIONS = {
    "checkpoint": ("Save a checkpoint", "Save a checkpoint after the present step?"),
    "trace": (f"Trace {STEPS} steps", f"Trace the next {STEPS} steps on every rank? They take longer meanwhile."),
    "stop": ("Stop", "End this run after one checkpoint? The command that started it resumes it."),
}
"""Action -> the button's label, and the question before it."""
_asked: set[tuple[str, str]] = set()
_asking = threading.Lock()
"""Of `_asked`: two requests of browsers are answered in two threads."""


def buttons() -> Markup:
    """The page's section with the actions; live.js asks the question and sends the request."""
    made = [
        tag("button", label, type="button", data_act=action, data_ask=question)
        for action, (label, question) in ACTIONS.items()
    ]
    return section(
        "Actions", [tag("p", made, class_="actions"), tag("p", "", id="action-answer", role="status")], id="actions"
    )


def ask(run: RunDir, action: str) -> str:
    """Sends the request, and returns what to say. Raises UsageError, StorageError."""
    if action not in ACTIONS:
        raise UsageError(f"there is no action {action[:40]!r}", f"there are {', '.join(ACTIONS)}")
    status = read_state(run)["status"]
    if status != "running":
        raise UsageError(f"run {run.name} is {status}", "only a run that is training can be asked for something")
    by = f"{getpass.getuser()} on {socket.gethostname()}, on the dashboard"
    if action == "stop":
        driver = newest_driver(run)
        if driver is None or not driver.alive:
            raise UsageError(f"run {run.name} has no driver of its own", "a sweep's cell is stopped with its sweep")
        first = ask_stop(run, driver, by)
        return f"{driver} {'is' if first else 'was'} asked to end the run after one checkpoint."
    if action == "checkpoint":
        return _beside(run, action, lambda: save_now(run, WAIT_S, by), "A checkpoint is asked for.")
    return _beside(
        run,
        action,
        lambda: record(run, STEPS, WAIT_S, by, lambda line: None),
        "A trace is asked for; its file will be in RUN/traces.",
    )


def _beside(run: RunDir, action: str, call: Callable[[], object], message: str) -> str:
    """Waits for the answer in a thread: what comes of it is in the run's events. Raises UsageError while one is on its way."""
    key = run.uri, action
    with _asking:
        if key in _asked:
            raise UsageError(f"run {run.name} is asked for a {action} already", "wait for it")
        _asked.add(key)

    def wait() -> None:
        try:
            call()
        except RaydistError as error:
            print(f"raydist: {error}", file=sys.stderr)
        finally:
            _asked.discard(key)

    threading.Thread(target=wait, name=f"raydist-{action}", daemon=True).start()
    return message
