"""SIGTERM while Ray connects, by its own process: what Ray's client does to it is done with ctypes."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CODE = """
import ctypes, os, signal, sys, threading, time
from raydist.cluster.termination import ends_on_sigterm
libc, term = ctypes.CDLL(None), int(signal.SIGTERM)
if sys.argv[1] == "handler":
    signal.signal(term, lambda *_: (print("called", flush=True), os._exit(7)))
with ends_on_sigterm():
    libc.signal(term, ctypes.c_void_p(1))  # it is ignored
    if sys.argv[1] == "within":
        print("ready", flush=True)
        libc.pause()
    elif sys.argv[1] == "handler":
        os.kill(os.getpid(), term)
        print("within", flush=True)
print("ready", flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(
    ("when", "said", "code"),
    [("within", "ready\n", -signal.SIGTERM), ("after", "ready\n", -signal.SIGTERM), ("handler", "within\ncalled\n", 7)],
)
def test_it_ends_the_process(when: str, said: str, code: int) -> None:
    """At once while the main thread waits in a library which has another handler; and afterwards. A handler of Python is called."""
    process = subprocess.Popen([sys.executable, "-c", CODE, when], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    told = process.stdout.readline()
    if when != "handler":
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(60)
    finally:
        process.kill()
    with process:
        told += process.stdout.read()
    assert (told, process.returncode) == (said, code)
