"""Checks of a step while a run trains: bad numbers, gradients, replicas that should be equal.

Runs in: each train worker. Torch, never ray.
"""
