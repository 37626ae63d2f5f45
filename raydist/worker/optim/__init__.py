"""Optimizers, the learning rate schedule, and optimizer state in host memory or on disk.

Runs in: each train worker. Torch, never ray.
"""
