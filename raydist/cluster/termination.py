"""SIGTERM ends this process at once while Ray connects, and afterwards as before.

Runs in: the driver, around ray.init. Never imports ray or torch.

Ray's client replaces the action of SIGTERM: it prints its stack, in which it may hang, and aborts after 3 s. It then waits for the
raylet, where no signal handler of Python runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator

_LOOK_S = 0.2
_DEFAULT = 0  # SIG_DFL


@contextlib.contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """In the main thread, if no handler of Python is set for SIGTERM: ends this process within the block, and after it again.

    With a handler of Python, the handler is called after the block. Elsewhere it does nothing.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    # Threads that Ray starts inherit this, so that none of them receives it. Processes are not started here.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    over = threading.Event()
    if before == signal.SIG_DFL:
        threading.Thread(target=_wait, args=(over,), name="raydist-sigterm", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _wait(over: threading.Event) -> None:
    while not over.is_set():
        if signal.sigtimedwait([signal.SIGTERM], _LOOK_S) is None:
            continue
        if not over.is_set():
            ctypes.CDLL(None).signal(int(signal.SIGTERM), ctypes.c_void_p(_DEFAULT))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)  # else the main thread gets it
