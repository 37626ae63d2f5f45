"""What commands write in the same way: the file that `-o` names.

Runs in: the user's shell.
"""

from __future__ import annotations

from pathlib import Path

from raydist.errors import UserError


def write(out: Path, data: bytes | str) -> None:
    """Writes `data` to `out`, text as UTF-8. Raises UserError."""
    try:
        out.write_bytes(data.encode() if isinstance(data, str) else data)
    except OSError as error:
        raise UserError(f"{out}: cannot be written: {error.strerror}", "check the path given with -o") from None
