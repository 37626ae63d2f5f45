"""Injects faults on a rank (raydist/faults defines them).

Runs in: each train worker. Torch, never ray.
"""


class InjectedError(Exception):
    """Raised by `fault: raise`, like a bug in the user's code; also if a fault cannot be injected."""
