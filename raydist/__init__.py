"""raydist: trains PyTorch models on a Ray cluster, and recovers from failures."""

__version__ = "0.1.0"
