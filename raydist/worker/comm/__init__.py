"""Communication between ranks: the size of DDP's buckets, and plain values gathered as JSON.

Runs in: each train worker. Torch, never ray.
"""
