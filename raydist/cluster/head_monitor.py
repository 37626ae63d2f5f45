"""Checks whether the cluster's head answers. Ray ends a process that has lost the head for a minute, without any message.

Runs in: the driver, in a thread. Never imports torch or ray: it only opens TCP connections.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

lost = False
"""Whether a session ended after its head was lost, or while a thread was in a call of Ray. Ray's client must not disconnect then:
it would exit the process with code 1."""
_OURS = ("raydist-", "ray_tune")
"""How the names of raydist's threads begin, and of the one that runs Ray Tune."""
QUIET_S, _QUIET_LOOK_S = 10.0, 0.02
_LOOK_S = 1.0
_CONNECT_S = 3.0


class HeadMonitor:
    """Connects to the head every second, from its construction to `close`. `address`: HOST:PORT of the head."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._last_answer = time.monotonic()
        self.dead = False
        """Whether another cluster answers at that address: see `replace`."""
        self._closed = threading.Event()
        threading.Thread(target=self._watch, name="raydist-head", daemon=True).start()

    @property
    def silent_s(self) -> float:
        """Seconds since the head last answered."""
        return time.monotonic() - self._last_answer

    patience_s = 0.0
    """How long a run may go on with a dead head."""

    def replace(self) -> None:
        """The head was started again: its cluster is another one, in which the run has no actor. From any thread."""
        self.dead = True

    def why(self, seconds: float) -> str:
        """What is wrong, for a run's cause."""
        if self.dead:
            return f"Ray's head at {self.address} was started again, as another cluster, which does not have this run's actors"
        return f"Ray's head at {self.address} has not answered for {seconds:.0f} s"

    def close(self) -> None:
        """Stops the checks."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            asked = time.monotonic()
            if answers(self.address):
                self._last_answer = asked


def answers(address: str) -> bool:
    """Whether the head at HOST:PORT answers within 3 s."""
    host, _, port = address.rpartition(":")
    try:
        return speaks_grpc(host.strip("[]"), int(port))
    except OSError:
        return False


def speaks_grpc(host: str, port: int) -> bool:
    """Whether an HTTP/2 server answers there, as Ray's head does. Raises OSError if nothing answers within 3 s."""
    with socket.create_connection((host, port), timeout=_CONNECT_S) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))  # preface, SETTINGS
        head = sock.recv(9)
    return len(head) == 9 and head[3] == 4  # the type of its first frame: SETTINGS


def quiet() -> bool:
    """Waits until no thread of raydist is in a call of Ray: if Ray is shut down meanwhile, such a call may end the process, as by
    SIGSEGV. False, and the head is `lost`, if one has not returned after QUIET_S."""
    global lost
    until = time.monotonic() + QUIET_S
    while _calls_ray():
        if time.monotonic() > until:
            lost = True
            return False
        time.sleep(_QUIET_LOOK_S)
    return True


def _calls_ray() -> bool:
    frames = sys._current_frames()
    for thread in threading.enumerate():
        at = frames.get(thread.ident or 0) if thread.name.startswith(_OURS) else None
        while at is not None:
            if str(at.f_globals.get("__name__")).partition(".")[0] == "ray":
                return True
            at = at.f_back
    return False


def leave(code: int) -> None:
    """Exits with that code. If the head is lost: with os._exit, because Ray's exit handler would try to disconnect."""
    if lost:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    sys.exit(code)
