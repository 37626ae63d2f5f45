"""Checks during training: steps with bad numbers, gradients, replicas that should be equal.

Runs in: each train worker. Torch, never ray.
"""
