"""In every train worker: setup, data, model, strategy, the loop. Torch, never ray, but for entry.py, the one door."""
