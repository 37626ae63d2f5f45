"""What a `raydist` command and the Python process that started it tell one another: the error at the end, and that it is alive.

Runs in: both processes. Must stay light: each command imports it.

The variable RAYDIST_PARENT has two descriptors, `ERROR,ALIVE`. The command writes its error to the first, as JSON that is parsed
and never unpickled. The second, -1 if the run goes on without its parent, is the read end of a pipe that only the parent can write
to: its end is the parent's end.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from contextlib import suppress
from typing import Any

from raydist import errors
from raydist.errors import RaydistError

VARIABLE = "RAYDIST_PARENT"
_MOST = 1 << 20
"""Bytes of an error that are read."""


class Parent:
    """The command's side."""

    def __init__(self, error: int | None = None, alive: int | None = None) -> None:
        self._error = error
        if alive is not None:
            threading.Thread(target=_interrupt_at_end, args=(alive,), name="raydist-parent", daemon=True).start()

    @classmethod
    def take(cls) -> Parent:
        """The parent that the environment names, which is removed there: no process that this one starts has it."""
        numbers = os.environ.pop(VARIABLE, "").split(",")
        try:
            error, alive = (int(number) for number in numbers)
            os.set_inheritable(error, False)
            if alive >= 0:
                os.set_inheritable(alive, False)
        except (ValueError, OSError):
            return cls()
        return cls(error, alive if alive >= 0 else None)

    def tell(self, error: RaydistError) -> None:
        """Sends the error, if there is a parent and it still reads."""
        if self._error is not None:
            with suppress(OSError):
                os.write(self._error, json.dumps([type(error).__name__, error.message, error.hint]).encode()[:_MOST])


def _interrupt_at_end(alive: int) -> None:
    with suppress(OSError):
        os.read(alive, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def parsed(data: bytes) -> RaydistError | None:
    """The error that a command sent; None if it sent none."""
    try:
        name, message, hint = json.loads(data[:_MOST])
    except (ValueError, TypeError, RecursionError):
        return None
    kind: Any = getattr(errors, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, RaydistError)):
        kind = RaydistError
    made: RaydistError = kind(str(message), str(hint))
    return made
