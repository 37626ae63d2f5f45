"""Saves and restores the training state: shards of raw tensor bytes, and a manifest that makes them a checkpoint.

    manager.py            called by the loop: register, resume, save, snapshot
    state_dict.py         the training state as flat tensors and plain values, and back
    extra_state.py        the protocol of state that is neither the model's nor the optimizer's
    save.py               the Saver: one save in flight; shards first, the manifest last
    save_in_flight.py     one save in flight, and its result
    commit.py             rank 0's part: coverage check, manifest, deletion of old checkpoints, eval losses
    save_plan.py          which bytes of which tensors a rank writes, and their positions in its shard
    staging.py            the copy of those bytes to kept buffers, during the next forward and backward pass
    agreement.py          what ranks tell each other while they save and load: values and errors as JSON
    shard_writer.py       writes a rank's hashed shard; rank 0 divides what several ranks have, and merges the results
    shard_reader.py       reads of each tensor the part that a rank has
    restore.py            finds the newest checkpoint with right hashes, and loads it on any mesh
    numbers.py            which fields of a spec change the numbers, and which of them may change in a resumed run
    memory_manager.py     copies in the nodes' memory: when one is taken, and which one a restart continues from
    memory_saver.py       this rank's part of such a copy, in shared memory
    memory_sharing.py     the files of such a copy that all ranks read, sent to the nodes that lack them
    snapshot_interval.py  how often such copies are taken
    export.py             weights for other programs

The format itself (manifests, retention, mirrors) is raydist/checkpoint, without torch.

Runs in: each train worker. This file imports nothing: the driver imports numbers.py without torch.
"""
