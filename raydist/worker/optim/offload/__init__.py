"""Optimizer state off the device: in host memory, or in a scratch file on a local disk. See docs/how-to/offload.md.

Runs in: each train worker. Torch, never ray.

    adamw.py      the optimizer, with the interface of torch.optim.AdamW
    layout.py     which values are in which chunk
    moments.py    exp_avg and exp_avg_sq in memory, or in a file and streamed through a few buffers
    swapfile.py   the scratch file
    swap_space.py checks the free space in its folder; does not import torch, for the driver's node check
    hostcopy.py   parameters and gradients of a device in host memory, and the copies in both directions
"""
