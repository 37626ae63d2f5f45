"""Sums of gradients in fewer bytes: everything around a compressor (worker/comm/compressors) that is the same for all of them.

Runs in: each train worker. Torch, never ray.

    piece.py    gradients that are sent together, as rows for the ranks; what each step left of them
    lane.py     work on one piece after another, beside the backward pass
    reducer.py  encode, exchange, add, decode: an all-reduce or a reduce-scatter of a piece
    state.py    what is kept between steps: committed with the update, saved in checkpoints; metrics

Strategies call a `Reducer`: ddp for its buckets, zero1 and zero2 for their units, zero3 and hsdp for those of FSDP2.
"""
