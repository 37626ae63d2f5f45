"""Where an attempt's ranks will meet: a reserved port for torch's store, and the secret by which they know each other.

Runs in: rank 0's agent or worker, and the coordinator. Neither torch nor ray.
"""

from __future__ import annotations

import secrets
import socket


def new_secret() -> str:
    """256 random bits as text. Each attempt has its own."""
    return secrets.token_hex(32)


def hold_port(host: str) -> socket.socket:
    """A socket that reserves a port of that address of this host, for torch's store in another process.

    The store listens on that address only. Linux assigns a bound port to no other socket, but a socket that asks for its number
    can listen on it if both have SO_REUSEADDR, as the store's has (raydist/worker/comm/rendezvous.py).
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    return sock


def port_of(sock: socket.socket) -> int:
    """The port's number."""
    return int(sock.getsockname()[1])
