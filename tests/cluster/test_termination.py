"""SIGTERM while Ray connects. What Ray's client does to it is done with ctypes, in a process of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

CODE = """
import ctypes, os, signal, sys, time
from raydist.cluster.termination import sigterm_kept
libc, term = ctypes.CDLL(None), int(signal.SIGTERM)
if sys.argv[2] == "handler":
    signal.signal(term, lambda *_: os._exit(7))
with sigterm_kept():
    libc.signal(term, ctypes.c_void_p(1))  # it is ignored
    if sys.argv[1] == "within":
        print("ready", flush=True)
        while True:
            libc.usleep(10_000)
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.mark.parametrize("when", ["within", "after"])
@pytest.mark.parametrize(("how", "code"), [("default", -signal.SIGTERM), ("handler", 7)])
def test_it_ends_the_process(when: str, how: str, code: int) -> None:
    """While the main thread waits in a library which has set another action, and afterwards; as a handler of Python says."""
    process = subprocess.Popen([sys.executable, "-c", CODE, when, how], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            deadline = time.monotonic() + 60
            while process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            process.kill()
    assert process.returncode == code
