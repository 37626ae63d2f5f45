"""In every train worker: setup, data, model, strategy, the loop. Torch, never ray, but for entry.py, the one door."""

RENDEZVOUS_FD = "RAYDIST_RENDEZVOUS_FD"
"""Environment of a worker on Ray: on rank 0 the descriptor of a socket that is bound to MASTER_PORT already, elsewhere -1."""
