"""Where an attempt's ranks meet: a reserved port for torch's store, the secret by which they know each other, and their numbers.

Runs in: rank 0's agent or worker, and the coordinator. Neither torch nor ray.
"""

from __future__ import annotations

import secrets
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any


def new_secret() -> str:
    """256 random bits as text. Each attempt has its own."""
    return secrets.token_hex(32)


def rank_variables(offers: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The environment of each rank, with the variables of torchrun. `offers`: of the ranks' agents (coordinator.py). LOCAL_RANK is
    the agent's own: it numbers the devices that Ray gave to the node's workers.
    """
    count = Counter(offer["node"] for offer in offers)
    nodes = {node: at for at, node in enumerate(count)}
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(offers)),
            "LOCAL_RANK": str(offer["local_rank"]),
            "LOCAL_WORLD_SIZE": str(count[offer["node"]]),
            "NODE_RANK": str(nodes[offer["node"]]),
        }
        for rank, offer in enumerate(offers)
    ]


def hold_port(host: str) -> socket.socket:
    """A socket that reserves a port of that address of this host for another process of this user, which listens on it.

    Linux assigns a bound port to no other socket. One that asks for its number gets it if both have SO_REUSEPORT and the same user;
    with SO_REUSEADDR any user would. The listener is torch's store (raydist/worker/comm/rendezvous.py), on that address only.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(address)
    return sock


def port_of(sock: socket.socket) -> int:
    """The port's number."""
    return int(sock.getsockname()[1])
