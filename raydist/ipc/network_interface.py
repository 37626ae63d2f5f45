"""Which network interface carries an address. Runs in: train workers and the nodes' agents. Neither torch nor ray."""

from __future__ import annotations

import psutil


def interface_of(ip: str) -> str | None:
    """The name of the network interface that carries an address; None if none does."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.split("%")[0] == ip for a in addresses):
            return name
    return None
