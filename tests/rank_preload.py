"""What the fork server of the tests' ranks imports last: see `Ranks` in tests/conftest.py.

All of its objects are left out of garbage collection here, before the forks, so that a rank copies none of their pages.
"""

from __future__ import annotations

import functools
import gc
from typing import Any


def caches() -> list[Any]:
    """torch's caches of collectives and shardings, which keep process groups, among the objects that may be collected."""
    # Not isinstance: some objects are proxies whose target no longer exists.
    found = [cached for cached in gc.get_objects() if type(cached) is functools._lru_cache_wrapper]
    return [cached for cached in found if cached.__module__.startswith("torch.distributed")]


CACHES = caches()
"""Of the modules that were imported before this one."""
gc.collect()
gc.freeze()
