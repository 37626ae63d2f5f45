"""Runs a sweep: trains its trials on the cluster, as many at once as fit; a scheduler stops bad trials early.

A trial (a "cell" in file names, event data, JSON keys and spec fields) is one ordinary run of raydist. Ray Tune holds one of
its own trials for each.

Runs in: the driver, and one zero-CPU actor of Ray Tune for each running trial. Never imports torch.

    sweep.py               the whole sweep, from the first trial to the last
    trial_setup.py         prepares trials: their data, number of workers, how many train at once
    capacity.py            how many trials fit at once, so that none waits for another's workers (pure)
    worker_group_pool.py   slots for worker groups, as many as the cluster has room for
    trial_runner.py        starts and ends trials
    trial.py               one trial: its run, its retries, and its reports to Ray Tune
    paused_trials.py       the order of paused trials, if more are in progress than fit
    micro_batch_memory.py  the micro-batch that a trial starts with, after one ran out of memory
    report_queue.py        takes the trials' reports to Ray Tune's actors
    ray_tune.py            adapter to Ray Tune: its trials, their order, the scheduler's decisions
    schedulers/            which trials stop early, or continue from another's checkpoint: one scheduler per file (pure)
    search.py              trials that are chosen from earlier results, logged before they train
    sampler.py             which point is next: optuna, in its own actor
    pbt_exploit.py         copies another trial's checkpoint into a trial's run
    budget.py              time and GPU-hours spent, and the limits (pure)
    result_export.py       one row per ended trial in TensorBoard and MLflow
"""
