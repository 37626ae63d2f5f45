"""A function of raydist in a process of its own: its arguments, its progress, its result or error, its end.

Runs in: the user's process. driver.py is the other side.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from numbers import Real
from typing import IO, Any, ParamSpec, Protocol, TypeVar

from raydist.errors import SIGNALLED, RaydistError, TrainingStopped, UsageError, error_from

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
# With -P: a file in the working directory is not imported in place of a module of Python's, or an installed one.
_START = (
    "import sys; sys.path.append(sys.argv.pop(1)); from raydist.api.driver import main; "
    "main(sys.argv[1], *map(int, sys.argv[2:]))"
)
_RAYDIST = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LAST = 4096
"""Bytes of the process's output that are shown if it ends without an error of raydist's."""


class Call:
    """Calls `function`, as package.module:name, with these keyword arguments: plain values, paths and specs, which may be secrets.

    `tied`: it ends, after a checkpoint, when this process ends, and prints its progress on this process's stderr. Otherwise it goes
    on alone, and prints nothing. `trusted`: whether it may run the code of the user's that a run's spec names.
    """

    def __init__(self, function: str, arguments: Mapping[str, Any], tied: bool = True, trusted: bool = True) -> None:
        message = json.dumps({"arguments": arguments, "trusted": trusted}, default=_plain).encode()
        # Without a name, and gone with both processes.
        self._message = os.fdopen(os.memfd_create("raydist-call"), "w+b")
        self._message.write(message)
        self._message.flush()
        alive, self._alive = os.pipe() if tied else (-1, -1)
        self._output: IO[bytes] | None = None
        self._failure: RaydistError | None = None
        self._forward: threading.Thread | None = None
        stderr: int | IO[bytes]
        if not tied:
            stderr = self._output = tempfile.TemporaryFile()  # noqa: SIM115 - read at the process's end
        else:
            stderr = _terminal() or subprocess.PIPE
        numbers = self._message.fileno(), alive
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, _RAYDIST, function, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[number for number in numbers if number >= 0],
                # A notebook interrupts its own process group; and the run that is not tied outlives the terminal.
                start_new_session=True,
            )
        finally:
            if alive >= 0:
                os.close(alive)
        if stderr is subprocess.PIPE:
            self._forward = threading.Thread(target=self._print, name="raydist-output", daemon=True)
            self._forward.start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for its end, and returns its result. Raises TimeoutError after `timeout` seconds, and the error that it raised.

        A KeyboardInterrupt is passed on to the process, which writes a checkpoint and ends, and is then raised. A second one ends
        the process at once.
        """
        try:
            self._wait(timeout)
        except KeyboardInterrupt:
            self._process.send_signal(signal.SIGINT)
            try:
                self._wait(None)
            except KeyboardInterrupt:
                self._process.send_signal(signal.SIGINT)
                self._wait(None)
            raise
        return self._result()

    def _wait(self, timeout: float | None) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"process {self.pid} has not ended in {timeout:g} s") from None
        if self._forward is not None:
            self._forward.join()

    def _result(self) -> Any:
        code = self._process.returncode
        self._message.seek(0)
        result, error = answer(self._message.read())
        if code in (0, *SIGNALLED):
            return result
        if self._failure is None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            remedy = self._last() or "the same call again: a run resumes from its newest checkpoint"
            self._failure = error or TrainingStopped(f"the driver {how}", remedy)
        raise self._failure

    def _last(self) -> str:
        if self._output is None:
            return ""
        size = self._output.seek(0, os.SEEK_END)
        self._output.seek(max(0, size - _LAST))
        return self._output.read().decode(errors="replace").strip()

    def _print(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            print(line.decode(errors="replace"), end="", file=sys.stderr, flush=True)

    def __del__(self) -> None:
        with suppress(AttributeError):  # of one whose process could not be started
            for file in (self._message, self._output, self._process.stderr):
                if file is not None:
                    file.close()
            if self._alive >= 0:
                os.close(self._alive)  # the process ends if it has not


class Separate(Protocol[P, R_co]):
    """A function that works in a process of its own, and `here` in this one, as its command does."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: D102

    @property
    def here(self) -> Callable[P, R_co]: ...  # noqa: D102


def separate(function: Callable[P, R_co]) -> Separate[P, R_co]:
    """Decorates a function of a module, with plain values as arguments and result. Raises InterruptedError if a signal ends it.

    One that reads what others have made has an argument `trust`, False by default: whether code that this names may run.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R_co:
        given = signature.bind(*args, **kwargs).arguments
        trusted = bool(given.get("trust", "trust" not in signature.parameters))
        result: Any = Call(f"{function.__module__}:{function.__name__}", given, trusted=trusted).wait()
        if result is None:
            raise InterruptedError(f"{function.__name__} was interrupted")
        return result  # type: ignore[no-any-return]

    call.here = function  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    try:
        return os.fspath(value)
    except TypeError:
        pass
    if getattr(value, "shape", None) == ():  # a number of numpy or torch
        return value.item()
    raise UsageError(
        f"{value!r:.60}: a {type(value).__module__}.{type(value).__qualname__} is not a value of a job",
        "give numbers, texts, lists and dicts",
    )


def check_numbers(most: float = math.inf, **numbers: tuple[float | None, float]) -> None:
    """Raises UsageError. Of each argument its value, and the least that it may be; `most`: what none may exceed."""
    for name, (value, least) in numbers.items():
        # A script may give anything, numbers of numpy and torch included.
        number = isinstance(value, Real) or getattr(value, "shape", None) == ()
        if value is not None and not (number and least <= value <= most and math.isfinite(value)):
            limits = f"of at least {least}" if most == math.inf else f"from {least} to {most}"
            shown = str(value) if number else f"{value!r:.60}"
            raise UsageError(f"{name}={shown}: is not a number {limits}", "give another one, or leave it out")


def answer(data: bytes) -> tuple[Any, RaydistError | None]:
    """What the process has written: the result, and the error. None for each that it has not."""
    try:
        answered = json.loads(data)
        name, message, hint = answered.get("error", ("", "", ""))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None, None
    if not name:
        return answered.get("result"), None
    return None, error_from((name, message, hint), RaydistError)


def _terminal() -> int | None:
    """The descriptor of this process's stderr, if it is a terminal."""
    try:
        return sys.stderr.fileno() if sys.stderr.isatty() else None
    except (AttributeError, OSError, ValueError):  # a notebook's stderr has none
        return None
