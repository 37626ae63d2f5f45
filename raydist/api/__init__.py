"""The Python API: start, follow, read and stop runs and sweeps from a script or a notebook.

Runs in: the user's process. Imports neither torch nor ray, and starts none of them there: a run has a driver process of its own.

    import raydist

    run = raydist.train("jobs/quickstart.yaml", set={"train.steps": 100})
    run.steps().to_pandas()
    raydist.run_script("train.py", ["--lr", 0.1], workers=4)
    raydist.list_runs()
    raydist.open("runs/quickstart").report("report.html")
    raydist.sweep("tune_sweeps/lr-batch.yaml").results()

    start.py, runs.py, sweeps.py                  what users call, by the names in raydist/__init__.py
    planning.py, checking.py, evaluating.py,
    examining.py, forecasting.py, datasets.py,
    submitting.py                                 the same, each with a process of its own
    training.py, scripts.py, sweep_training.py    the drivers, in a process of their own, or in that of a command of raydist/cli
    call.py, driver.py                            both sides of a call that has a process of its own
    process.py, crash.py                          what is around such a call, and around a command
"""
