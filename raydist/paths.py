"""Paths of this host as users write them, and this user's cache.

Runs anywhere.
"""

from __future__ import annotations

import os
from pathlib import Path


def local_path(text: str | os.PathLike[str]) -> Path:
    """That path, with ~ and ~USER expanded; as written if there is no such user, where Path.expanduser raises RuntimeError."""
    return Path(os.path.expanduser(text))


def cache_folder() -> Path:
    """For what can be made or downloaded again: $RAYDIST_CACHE, or ~/.cache/raydist."""
    return local_path(os.environ.get("RAYDIST_CACHE") or "~/.cache/raydist")
