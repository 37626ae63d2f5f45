"""Reserves a port for torch's store.

Runs in: rank 0's agent, or worker. Neither torch nor ray.
"""

from __future__ import annotations

import socket


def hold_port() -> socket.socket:
    """A socket that reserves a port of this host, on all its addresses, for torch's store in another process.

    Torch's store listens on all addresses. A connection that uses the port on any of them, loopback too, would block it, and Ray
    opens many. So this binds the port on all addresses: Linux then assigns it to no other socket, but a socket that asks for its
    number can listen on it if both have SO_REUSEADDR, as the store does.
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
    """The port's number."""
    return int(sock.getsockname()[1])
