"""raydist: trains PyTorch models on a Ray cluster, and gets them to the end."""

__version__ = "0.1.0"
