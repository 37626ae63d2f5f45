"""Saves and restores the training state: shards of raw tensor bytes, and a manifest that makes them a checkpoint.

    manager.py            what the loop calls: resume, save, snapshot
    state_dict.py         the training state as flat tensors and plain values, and back
    save.py               the Saver: one save in flight, shards first, the manifest last, then old checkpoints are deleted
    save_plan.py          which bytes of which tensors a rank writes, and where in its shard
    staging.py            the copy of those bytes: kept buffers, beside the next forward and backward pass
    dcp_storage.py        torch.distributed.checkpoint's storage interface: hashed shards out, verified bytes in; no pickle
    restore.py            the newest checkpoint whose every hash is right, at any world size
    numbers.py            what of a spec changes the numbers, and which change a resumed run may have
    memory_manager.py     copies in the nodes' memory: when one is taken, and which one to go on from
    memory_saver.py       this rank's part of such a copy, in shared memory
    snapshot_interval.py  how often such copies are taken
    export.py             weights for others to load

The format itself (manifests, retention, mirrors) is raydist/checkpoint, without torch.

Runs in: each train worker. Imports nothing here, so that the plain parts stay light.
"""
