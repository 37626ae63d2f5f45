"""An exception that no command expects: a short message, and a file with the traceback.

Runs in: the user's shell. Must stay light.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from raydist import __version__
from raydist.errors import RaydistError
from raydist.paths import cache_folder
from raydist.printable import printable
from raydist.private_files import make_private_folder
from raydist.redact import redact

INTERNAL = 70
"""The exit code: EX_SOFTWARE of sysexits.h."""
_SHOWN = 300


def report(error: BaseException) -> RaydistError:
    """Prints two lines on stderr, writes the traceback to a file, and returns an error with these lines."""
    what = " ".join(printable(redact(f"{type(error).__name__}: {error}")).split())
    try:
        remedy = f"please report it, with {_written(error)}"
    except OSError as failure:
        remedy = f"please report it; its traceback could not be written: {failure}"
    told = RaydistError(f"an error of raydist itself: {what[:_SHOWN]}", remedy)
    print(f"raydist: {told}", file=sys.stderr)
    return told


def _written(error: BaseException) -> Path:
    """The file with the command, the version and the traceback, without secrets; only this user may read it."""
    head = (
        f"{time.strftime('%Y-%m-%d %H:%M:%S')} raydist {__version__}, Python {sys.version.split()[0]}: {sys.argv[1:]}\n"
    )
    text = printable(redact(head + "".join(traceback.format_exception(error))))
    folder = cache_folder() / "errors"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_private_folder(folder)
    except OSError:
        folder = Path(tempfile.gettempdir())
    handle, path = tempfile.mkstemp(prefix=time.strftime("raydist-%Y%m%d-%H%M%S-"), suffix=".log", dir=folder)
    with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)
    return Path(path)
