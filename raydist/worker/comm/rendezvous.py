"""Where the ranks of an attempt meet: torch's store, on one address, and proof that each rank was started by the run's driver.

Runs in: each train worker. Torch, never ray.

Torch's store, gloo and NCCL have no authentication: a process that reaches their ports can take a rank's place. So each attempt has
a secret, which the coordinator sends to the agents with the order to train. A rank signs a hello in the store, and once the group
is connected it answers each peer's challenge over their own connection. A rank that cannot is refused before a value of it is used.
This does not encrypt or sign what follows: see docs/explanation/security.md.

    rank r --store--> hello r, signed --------> rank 0 checks them all, and signs that the ranks are complete
    rank r --group--> challenge of each peer -> the answer, signed with the secret and both rank numbers
"""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import secrets
import socket
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from raydist.errors import RankRefused
from raydist.ipc import RENDEZVOUS_SECRET

GRACE_S = 10.0
"""How long rank 0 waits for a rank's own hello, if something else is in its place."""
_AGAIN_S = 0.02
_CONNECT_S = 5.0
_CONNECTIONS_S = 5000
"""How many connections all ranks together try in a second, at most, while rank 0 does not listen."""
_CHALLENGE = 32
_ANSWER = hashlib.sha256().digest_size


def take_secret() -> bytes:
    """The attempt's secret, which is removed from the environment: processes that this rank starts do not get it. b"": none."""
    return os.environ.pop(RENDEZVOUS_SECRET, "").encode()


def meet(rank: int, world_size: int, timeout: timedelta, secret: bytes) -> Store:
    """The store of this attempt's ranks. With a secret rank 0 listens on MASTER_ADDR only, and every rank's hello was checked.

    Raises RankRefused. Under torchrun the agents' store is used, which listens on all addresses.
    """
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank:
        await_listener(host, port, world_size, timeout.total_seconds())
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not secret:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
    else:
        store = TCPStore(
            host,
            port,
            world_size,
            is_master=rank == 0,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=_listener(host, port) if rank == 0 else None,
        )
    store.set_timeout(timeout)
    if secret:
        greet(PrefixStore("raydist", store), rank, world_size, secret)
    return PrefixStore("default_pg", store)


def await_listener(host: str, port: int, world_size: int, timeout_s: float) -> None:
    """Waits until rank 0 listens. Torch's store would wait, too, but 0.3 to 0.7 s after each connection that is refused
    (ADR 8). What else is wrong with that address it finds out, and says.
    """
    wait, longest = 0.002, max(0.05, world_size / _CONNECTIONS_S)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
        except ConnectionRefusedError:
            time.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(1.5 * wait, longest)
        except OSError:
            return
        else:
            return


def _listener(host: str, port: int) -> int:
    """A socket bound to that address only. The agent holds the port for this user (raydist/launch/rendezvous.py)."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the agent's socket has
    # Without an agent MASTER_PORT is the user's: connections of a program that has just exited may still close.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(address)
    return sock.detach()


def greet(store: Store, rank: int, world_size: int, secret: bytes) -> None:
    """Each rank signs in; rank 0 checks all, and signs that they are complete. Returns on every rank, or raises RankRefused."""
    store.set(f"hello/{rank}", _sign(secret, "hello", rank, world_size).hex())
    complete = _sign(secret, "complete", world_size).hex()
    if rank == 0:
        for peer in range(world_size):
            _await(store, f"hello/{peer}", _sign(secret, "hello", peer, world_size).hex(), peer)
        store.set("complete", complete)
    _await(store, "complete", complete, 0)


def _await(store: Store, key: str, signed: str, peer: int) -> None:
    deadline = None
    while not hmac.compare_digest(store.get(key), signed.encode()):
        # Not of that rank, which may still come and write its own.
        deadline = deadline or time.monotonic() + GRACE_S
        if time.monotonic() > deadline:
            raise _refused(peer)
        time.sleep(_AGAIN_S)


def prove(group: dist.ProcessGroup, secret: bytes) -> None:
    """Challenges every peer over this group's own connection to it. A collective of a gloo group. Raises RankRefused."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    asked = torch.frombuffer(bytearray(secrets.token_bytes(world_size * _CHALLENGE)), dtype=torch.uint8)
    received = torch.empty_like(asked)
    dist.all_to_all_single(received, asked, group=group)
    answers = b"".join(
        _sign(secret, "answer", rank, peer, challenge) for peer, challenge in enumerate(_pieces(received, _CHALLENGE))
    )
    answered = torch.empty(world_size * _ANSWER, dtype=torch.uint8)
    dist.all_to_all_single(answered, torch.frombuffer(bytearray(answers), dtype=torch.uint8), group=group)
    pairs = zip(_pieces(asked, _CHALLENGE), _pieces(answered, _ANSWER), strict=True)
    for peer, (challenge, answer) in enumerate(pairs):
        if not hmac.compare_digest(answer, _sign(secret, "answer", peer, rank, challenge)):
            raise _refused(peer)


def _pieces(tensor: torch.Tensor, length: int) -> list[bytes]:
    data = tensor.numpy().tobytes()
    return [data[start : start + length] for start in range(0, len(data), length)]


def _sign(secret: bytes, purpose: str, *what: int | bytes) -> bytes:
    parts = [purpose, *(part.hex() if isinstance(part, bytes) else str(part) for part in what)]
    return hmac.digest(secret, "\0".join(parts).encode(), "sha256")


def _refused(peer: int) -> RankRefused:
    return RankRefused(
        f"rank {peer} did not prove that this run's driver started it: another process has taken its place",
        "find out which process connects to this run's ports, and keep the cluster's network private",
    )
