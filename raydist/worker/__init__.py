"""The code of every rank: process group, data, model, strategy, training loop. Torch, never ray: raydist/launch connects to Ray."""
