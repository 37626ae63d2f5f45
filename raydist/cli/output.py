"""What commands write in the same way: the file that `-o` names, and that a measurement was interrupted.

Runs in: the user's shell.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from raydist.errors import UserError

if TYPE_CHECKING:
    from raydist.cluster.bench import Interrupted


def measurement_interrupted(by: Interrupted) -> typer.Exit:
    """Says that a measurement ended without a result; the exit code to raise: 130 or 143."""
    print("raydist: interrupted; no result was kept", file=sys.stderr)
    return typer.Exit(130 if by.signal == signal.SIGINT else 143)


def write(out: Path, data: bytes | str) -> None:
    """Writes `data` to `out`, text as UTF-8. Raises UserError."""
    try:
        out.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror}", "check the path given with -o") from None
