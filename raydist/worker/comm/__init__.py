"""Communication between ranks: the rendezvous, plain values gathered as JSON, and the size of DDP's buckets.

Runs in: each train worker. Torch, never ray.
"""
