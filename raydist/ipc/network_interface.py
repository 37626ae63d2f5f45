"""Finds the network interface of an address. Runs in: train workers and the node monitors. Neither torch nor ray."""

from __future__ import annotations

import psutil


def interface_of(ip: str) -> str | None:
    """The name of the network interface that has this address; None if none has it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.split("%")[0] == ip for a in addresses):
            return name
    return None
