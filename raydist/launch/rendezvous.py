"""A port for torch's store that nobody else gets meanwhile.

Runs in: rank 0's agent, or worker. Neither torch nor ray.
"""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """A socket that holds a port of this host, on all its addresses, for torch's store, which will listen there in another process.

    Torch's store listens on all addresses: any connection that has the port on one of them, loopback too, would be in its way, and
    Ray opens many. So the port is bound here on all of them. Linux then gives it to nobody by itself, and lets who asks for it by
    number listen there if both have SO_REUSEADDR, as the store has.
    """
    if socket.has_dualstack_ipv6():
        sock = socket.socket(socket.AF_INET6)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    else:
        sock = socket.socket(socket.AF_INET)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("", 0))
    return sock


def port_of(sock: socket.socket) -> int:
    """The number of the port that it holds."""
    return int(sock.getsockname()[1])
