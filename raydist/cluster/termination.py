"""SIGTERM keeps its action while Ray connects, and afterwards.

Runs in: the driver, around ray.init. Never imports ray or torch.

Ray's client replaces that action by its own: it prints its stack, hangs in that, and aborts after 3 s. It then waits in C++ for the
raylet, so nothing but another thread can set it right.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
import threading
from collections.abc import Iterator

_AGAIN_S = 0.02
_BYTES = 512
"""More than a `struct sigaction` has anywhere."""


@contextlib.contextmanager
def sigterm_kept() -> Iterator[None]:
    """In the main thread: restores the present action of SIGTERM again and again within the block, and at its end."""
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    libc, action, over = ctypes.CDLL(None), ctypes.create_string_buffer(_BYTES), threading.Event()
    libc.sigaction(int(signal.SIGTERM), None, action)

    def restore() -> None:
        while not over.wait(_AGAIN_S):
            libc.sigaction(int(signal.SIGTERM), action, None)

    thread = threading.Thread(target=restore, name="raydist-sigterm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)
