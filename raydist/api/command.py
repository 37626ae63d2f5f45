"""A `raydist` command in a process of its own: its output, its error, its end.

Runs in: the user's process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO

from raydist.api.parent import VARIABLE, parsed
from raydist.errors import RaydistError, TrainingStopped

_LAST = 4096
"""Bytes of a command's output that are shown if it ends without an error of raydist's."""


class Command:
    """Starts `raydist ARGUMENTS`; `files`: descriptors that it needs as well.

    `tied`: it ends, after a checkpoint, when this process ends, and prints its progress on this process's stderr. Otherwise it goes
    on alone, and prints nothing.
    """

    def __init__(self, arguments: Sequence[str], files: Sequence[int] = (), tied: bool = True) -> None:
        error, send = os.pipe()
        alive, self._alive = os.pipe() if tied else (-1, -1)
        self._error = os.fdopen(error, "rb")
        self._output: IO[bytes] | None = None
        self._failure: RaydistError | None = None
        self._forward: threading.Thread | None = None
        stderr: int | IO[bytes]
        if not tied:
            stderr = self._output = tempfile.TemporaryFile()  # noqa: SIM115 - read at the command's end
        else:
            stderr = _terminal() or subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "raydist", *arguments],
                env={**os.environ, VARIABLE: f"{send},{alive}"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=[number for number in (send, alive, *files) if number >= 0],
                # A notebook interrupts its own process group; and the run that is not tied outlives the terminal.
                start_new_session=True,
            )
        finally:
            os.close(send)
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

    def wait(self, timeout: float | None = None) -> None:
        """Waits for its end. Raises TimeoutError after `timeout` seconds, and the command's error if it ended with one.

        A KeyboardInterrupt is passed on to the command, which writes a checkpoint and ends, and is then raised. A second one ends
        the command at once.
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
        self._raise()

    def _wait(self, timeout: float | None) -> None:
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the command has not ended in {timeout:g} s") from None
        if self._forward is not None:
            self._forward.join()

    def _raise(self) -> None:
        code = self._process.returncode
        if code in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM):
            return
        if self._failure is None:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            remedy = self._last() or "train again: it resumes from the newest checkpoint"
            self._failure = parsed(self._error.read()) or TrainingStopped(f"the driver {how}", remedy)
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
        for file in (self._error, self._output, self._process.stderr):
            if file is not None:
                file.close()
        if self._alive >= 0:
            os.close(self._alive)  # the command ends if it has not


def _terminal() -> int | None:
    """The descriptor of this process's stderr, if it is a terminal."""
    try:
        return sys.stderr.fileno() if sys.stderr.isatty() else None
    except (AttributeError, OSError, ValueError):  # a notebook's stderr has none
        return None
