"""Injected faults on a rank (raydist/faults has their descriptions).

Runs in: each train worker. Torch, never ray.
"""
