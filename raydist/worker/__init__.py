"""In every rank: process group, data, model, strategy, the loop. Torch, never ray: raydist/launch speaks to Ray."""
