"""The `raydist` command in a user's folder, and a look at what it leaves behind: as in tests/end_to_end."""

from __future__ import annotations

from tests.end_to_end.conftest import project

__all__ = ["project"]
