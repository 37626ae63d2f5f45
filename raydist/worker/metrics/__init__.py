"""Metrics of a rank: time, memory, communication, gradient noise; and the reporter, which sends records to the monitor.

Runs in: each train worker. Torch, never ray.
"""
