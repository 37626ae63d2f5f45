"""Sweeps as they run: a scheduler says which cells stop, Ray Tune keeps the cells' trials; every cell is an ordinary run of
raydist.

Runs in: the driver, and one light actor of Ray Tune for each cell that trains. Never imports torch.

    sweep.py               the whole, from the first cell to the last
    trial_setup.py         cells made ready to train: data, number of workers, how many at once
    capacity.py            how many cells at once, so that none ever waits for another (pure)
    worker_group_pool.py   slots for worker groups, as many as the cluster has room for
    trial_runner.py        begins and ends the cells that train
    trial.py               one cell: its run, tried again if it fails, and what Ray Tune is told of it
    paused_trials.py       which cell is next, where more are under way than fit
    micro_batch_memory.py  the micro-batch that a cell begins with, after one ran out of memory
    report_queue.py        where cells leave their reports for Ray Tune's actors
    ray_tune.py            Ray Tune's side: its trials, the cells' order, what the scheduler decides
    schedulers/            which cells stop early, and which go on from another's checkpoint: one scheduler a file (pure)
    search.py              cells that are chosen as results come, and written to the log before they train
    sampler.py             which point is tried next: optuna, in an actor of its own
    pbt_exploit.py         another cell's checkpoint becomes one of a cell's own run
    budget.py              what has been spent, and whether that is enough (pure)
    result_export.py       a row for each cell that is over, in TensorBoard and MLflow
"""
