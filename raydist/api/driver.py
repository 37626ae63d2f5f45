"""The process in which the Python API calls a function.

Runs in: the driver of a run or a sweep, which call.py has started as `main FUNCTION MESSAGE ALIVE`. Must stay light until it calls
the function.

MESSAGE is the descriptor of a file in memory, with the arguments, and then with the result or the error, as JSON: nothing is
unpickled. ALIVE, -1 if the function goes on without its caller, is the read end of a pipe that only the caller can write to: it
ends with the caller.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from typing import Any


def main(function: str, message: int, alive: int) -> None:
    """Calls the function, and exits with its exit code: what it returns if that is a whole number, anything else is its result."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # as in raydist/__main__.py
    os.set_inheritable(message, False)
    if alive >= 0:
        os.set_inheritable(alive, False)
        threading.Thread(target=_interrupt_at_end, args=(alive,), name="raydist-caller", daemon=True).start()
    import json
    from importlib import import_module

    from raydist.api import process
    from raydist.errors import RaydistError, error_facts

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(message, "r+b") as file:
        file.seek(0)  # the caller has written it
        request = json.load(file)

        def answer(**what: Any) -> None:
            file.seek(0)
            file.truncate()
            file.write(json.dumps(what).encode())
            file.flush()

        def call() -> None:
            module, _, name = function.partition(":")
            called = getattr(import_module(module), name)
            found = getattr(called, "here", called)(**request["arguments"])
            if found is not None and not isinstance(found, int):
                answer(result=found)
            sys.exit(found if isinstance(found, int) else 0)

        def tell(error: RaydistError) -> None:
            answer(error=error_facts(error))

        process.run(call, tell=tell, trusted=request["trusted"])


def _interrupt_at_end(alive: int) -> None:
    with suppress(OSError):
        os.read(alive, 1)
    os.kill(os.getpid(), signal.SIGTERM)
