"""What is around a command, and around a call of the Python API in a process of its own: imports, errors, the exit code.

Runs in: that process. Must stay light: `raydist --help` imports it.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Callable
from typing import TextIO, cast

import raydist
from raydist import registry
from raydist.api import crash
from raydist.cluster.head_monitor import leave
from raydist.display import Display
from raydist.errors import RaydistError, StorageError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Errors of a write to stdout if that is a file: disk full, quota exceeded, I/O error."""


def run(
    body: Callable[[], object],
    *,
    tell: Callable[[RaydistError], None] = lambda error: None,
    trusted: bool = True,
    started: bool = True,
) -> None:
    """Runs `body`, and exits with its code. A RaydistError is printed as one message on stderr, and given to `tell`, as
    is what a user is told of any other error.

    `trusted`: whether the user's own code may run. `started`: whether `body` starts something that storage may stop later.
    """
    try:
        _set_imports(trusted)
    except FileNotFoundError:
        print("raydist: the working directory no longer exists\n  change to an existing one: cd", file=sys.stderr)
        sys.exit(2)
    if started:  # None: descriptor 2 is closed
        sys.stderr = cast(TextIO, Display(sys.stderr or open(os.devnull, "w")))  # noqa: SIM115 - to the end
    try:
        body()
    except RaydistError as error:
        print(f"raydist: {error}", file=sys.stderr)
        tell(error)
        leave(2 if isinstance(error, StorageError) and not started else error.exit_code)
    except SystemExit as ended:
        if isinstance(ended.code, int):
            leave(ended.code)
        raise
    except KeyboardInterrupt:
        print("raydist: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError as error:
        if not _readers_gone():  # of another pipe or connection
            tell(crash.report(error))
            leave(crash.INTERNAL)
        # `raydist runs | head`: the reader closed the pipe, so nothing more may be written to stdout.
        sys.stdout = None
        sys.exit(0)
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            tell(crash.report(error))
            leave(crash.INTERNAL)
        # The buffer cannot be written: without this, Python would report the error again at exit.
        sys.stdout = None
        print(f"raydist: stdout cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(3)
    except Exception as error:
        tell(crash.report(error))
        leave(crash.INTERNAL)


def _readers_gone() -> bool:
    """Whether stdout or stderr is a pipe or a connection whose other end is closed."""
    ends = select.poll()
    for output in (1, 2):
        ends.register(output, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in ends.poll(0))


def _set_imports(trusted: bool) -> None:
    """What trains or plans may import the user's modules from the working directory, after the installed packages."""
    registry.own_code_last()
    registry.trust(trusted)
    # raydist itself may be imported from here, without being installed
    if not trusted and sys.path[-1] != os.path.dirname(raydist.__path__[0]):
        sys.path.pop()
