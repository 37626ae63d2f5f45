"""Communication of gradients: the size of DDP's buckets.

Runs in: each train worker. Torch, never ray.
"""
