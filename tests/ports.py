"""Ports for servers that take a number."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FIRST = 20_000
"""Ray's workers have the ports below, by default."""


def free_ports(n: int) -> list[int]:
    """Distinct ports on which nothing listens. The kernel gives none of them to a connection, or to a server that takes any port,
    in the seconds before the server listens."""
    last = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.SystemRandom().sample(range(_FIRST, max(last, _FIRST + 10_000)), 1000):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == n:
            return found
    raise AssertionError(f"only {len(found)} of 1000 ports are free")
