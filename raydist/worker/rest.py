"""Lets the main thread of a Ray worker sleep while a run is in its stride: Ray wakes it 100 times a second.

Runs in: the processes of Ray that stand beside ranks (agents, coordinator, monitor, controller). Neither torch nor ray.

Ray's worker loop asks Python every 10 ms whether a signal has come, and no setting changes that. It takes 0.5 to 1% of a core
in each process, and where ranks fill all cores every interruption of one keeps its peers waiting (docs/adr/0008). But what
Ray asks for it gets: a signal of our own, whose handler sleeps. While it sleeps, calls of the actor wait, NAP_S at most;
threads, an asyncio loop, and what of Ray ends or watches the process, do not.

Handlers can be set in the main thread only, where the constructor of an actor with coroutines does not run, but the import of
its class does. So this module sets its own when it is imported: at the top of a module that has an actor's class.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from types import CodeType, FrameType

NAP_S = 0.25
STRIDE_S = 10.0
"""An attempt that has lasted so long is in its stride: nothing is to be done in a hurry until a rank ends."""
_SOON_S = 1e-3

_resting = False


def begin() -> None:
    """From now on the main thread naps whenever it has nothing to do. From any thread; does nothing where it is no worker's."""
    global _resting
    if _LOOP is not None and not _resting:
        _resting = True
        signal.setitimer(signal.ITIMER_REAL, _SOON_S)


def end() -> None:
    """It is awake again, after the nap that it takes just now."""
    global _resting
    _resting = False


def _nap(number: int, frame: FrameType | None) -> None:
    if not _resting:
        return
    idle = frame is not None and frame.f_code is _LOOP  # else in the midst of a task: it is asked again later
    if idle:
        time.sleep(NAP_S)
    signal.setitimer(signal.ITIMER_REAL, _SOON_S if idle else NAP_S)


def _workers_loop() -> CodeType | None:
    """The code that a Ray worker's main thread is in between tasks; None if this is another thread, or no worker of Ray."""
    if threading.current_thread() is not threading.main_thread():
        return None
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "main_loop" and frame.f_globals["__name__"] == "ray._private.worker":
            return frame.f_code
        frame = frame.f_back
    return None


_LOOP = _workers_loop()
if _LOOP is not None:
    signal.signal(signal.SIGALRM, _nap)
