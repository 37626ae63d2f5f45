"""raydist: trains PyTorch models on a Ray cluster, and recovers from failures.

`raydist.train`, `raydist.run_script`, `raydist.sweep`, `raydist.open` and `raydist.list_runs` are the Python API (raydist/api),
which is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raydist.api import Run, Sweep, list_runs, open, run_script, sweep, train

__version__ = "0.1.0"
__all__ = ["Run", "Sweep", "list_runs", "open", "run_script", "sweep", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'raydist' has no attribute {name!r}")
    return getattr(import_module("raydist.api"), name)
