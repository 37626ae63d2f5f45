"""Sweeps as they run: a rule says which cells stop, Ray Tune keeps the cells' trials; every cell is an ordinary run of raydist.

Runs in: the driver, and one light actor of Ray Tune for each cell that trains. Never imports torch.

    capacity.py   how many cells at once, so that none ever waits for another (pure)
    pool.py       the slots of workers, as many as the cluster has room for
    trial runner.py      the cells that train on them
    cell.py       one cell: its run, tried again if it fails, and what Ray Tune is told of it
    fitting.py    the micro-batch that it begins with, after a lack of memory
    report queue.py       where cells leave their reports for Ray Tune's actors
    tuning.py     Ray Tune's side: its trials, the cells' order, what the rule decides
    search.py     cells that are chosen as results come, and written to the log before they train
    sampler.py    which point is tried next: optuna, in an actor of its own
    turns.py      whose turn it is, where more cells are under way than fit
    rules/        which cells stop early, and which go on from another's checkpoint: one rule a file (pure)
    adopt.py      another cell's checkpoint becomes one of a cell's own run
    limits.py     what has been spent, and whether that is enough (pure)
    rows.py       a row for each cell that is over, in TensorBoard and MLflow
    sweep.py      the whole, from the first cell to the last
"""
