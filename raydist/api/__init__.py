"""The Python API: start, follow, read and stop runs and sweeps from a script or a notebook.

Runs in: the user's process. Imports neither torch nor ray, and starts none of them there: a run has a driver process of its own.

    import raydist

    run = raydist.train("jobs/quickstart.yaml", set={"train.steps": 100})
    run.steps().to_pandas()
    raydist.run_script("train.py", ["--lr", 0.1], workers=4)
    raydist.list_runs()
    raydist.open("runs/quickstart").report("report.html")
    raydist.sweep("tune_sweeps/lr-batch.yaml").results()
"""

from __future__ import annotations

from raydist.api.runs import Run
from raydist.api.start import list_runs, open, run_script, sweep, train
from raydist.api.sweeps import Sweep

__all__ = ["Run", "Sweep", "list_runs", "open", "run_script", "sweep", "train"]
