"""raydist: trains PyTorch models on a Ray cluster, and recovers from failures.

`raydist.train`, `raydist.open` and the other functions here are the Python API (raydist/api), which is imported at its first use.
"""

# `python -m raydist` imports this before its path is in order (__main__.py): no module of Python's here, typing included.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from raydist.api.checking import check
    from raydist.api.datasets import prepare_data
    from raydist.api.evaluating import evaluate
    from raydist.api.examining import doctor
    from raydist.api.forecasting import forecast
    from raydist.api.planning import plan
    from raydist.api.runs import Run
    from raydist.api.start import list_runs, open, run_script, sweep, train
    from raydist.api.submitting import submit
    from raydist.api.sweeps import Sweep

__version__ = "0.1.0"
__all__ = [
    "Run", "Sweep", "check", "doctor", "evaluate", "forecast", "list_runs", "open", "plan", "prepare_data", "run_script", "submit",
    "sweep", "train",
]  # fmt: skip
_MODULES = {
    "Run": "runs", "Sweep": "sweeps", "check": "checking", "doctor": "examining", "evaluate": "evaluating",
    "forecast": "forecasting", "plan": "planning", "prepare_data": "datasets", "submit": "submitting",
}  # fmt: skip


def __getattr__(name: str) -> "Any":
    if name not in __all__:
        raise AttributeError(f"module 'raydist' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"raydist.api.{_MODULES.get(name, 'start')}"), name)
