"""The size of DDP's gradient buckets: `parallel.bucket_mb: auto` chooses one, and a run keeps it.

With small buckets all-reduces start early, overlap the rest of backward, and leave a short one at the end; but each bucket costs
the latency of an all-reduce. The trade-off depends on the link and on the model, so both are measured.

    model.py    pure: the cost of an all-reduce as a line, DDP's buckets, their exposed time, the best size
    measure.py  measures that line, and real passes, in the run's own group
    choose.py   chooses once per run and world size; stores the choice in the run's folder, and beside the runs for later runs
"""
