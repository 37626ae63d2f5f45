"""Injects faults on a rank (raydist/faults defines them).

Runs in: each train worker. Torch, never ray.
"""
