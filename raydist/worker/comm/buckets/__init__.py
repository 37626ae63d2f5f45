"""The size of DDP's gradient buckets: what it trades, how `parallel.bucket_mb: auto` finds one, and that a run keeps it.

Small buckets start their all-reduce early, beside the rest of backward, and leave a short one for its end; each costs the
latency of an all-reduce. How much of either a run has is a matter of its link and of its model, so both are measured.

    model.py    pure: the cost of an all-reduce as a line, DDP's buckets, what they leave exposed, the best size
    measure.py  that line, and real passes, in the run's own group
    choose.py   once for a run and world size; kept with the run, and beside the runs for the next one
"""
