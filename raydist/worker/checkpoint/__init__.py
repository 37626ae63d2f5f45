"""Saves and restores the training state: shards of raw tensor bytes, and a manifest that makes them a checkpoint.

    layout.py    which bytes of which tensors a rank writes, and where in its shard
    staging.py   the copy of those bytes: kept buffers, beside the next forward and backward pass
    dcp_storage.py torch.distributed.checkpoint's storage interface: hashed shards out, verified bytes in; no pickle
    save.py      the Saver: one save in flight, shards first, the manifest last, then the old ones go
    restore.py   the newest checkpoint whose every hash is right, at any world size
    manifest.py  what a checkpoint is made of; list, verify, best  (plain python: for the driver and the command line)
    pruning.py   which checkpoints go, and how no reader loses one (plain python)
    memory_manager.py copies in the nodes' memory: when one is taken, and which one to go on from
    memory_saver.py this rank's part of such a copy, in shared memory
    export.py    weights for others to load

Runs in: each train worker. Imports nothing here, so that the plain parts stay light.
"""
