"""Faults of a rank's network: its TCP connections send slowly, or receive nothing or out of order. No rights are needed.

Runs in: a rank of a run with faults. Neither torch nor ray. The kernel does it, socket by socket: the connections of gloo, of NCCL
over TCP, of torch's store and of storage, as far as they exist when the fault begins; not InfiniBand, nor other processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
from collections.abc import Callable

from raydist.worker.faults import InjectedError

# From asm-generic/socket.h; Python's socket module does not have them.
_SO_ATTACH_FILTER, _SO_DETACH_FILTER, _SO_MAX_PACING_RATE = 26, 27, 47
_UNLIMITED = 0xFFFFFFFF
_LOAD, _JUMP_IF_ABOVE, _RETURN = 0x20, 0x25, 0x06
"""Classic BPF: BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JGT | BPF_K, and BPF_RET | BPF_K, by which so many bytes of a packet are
kept; with 0 it is dropped."""
_RANDOM = 0xFFFFF000 + 56
"""SKF_AD_OFF + SKF_AD_RANDOM: what is loaded from there is 32 random bits."""


def slow(seconds: float, bytes_per_s: int) -> None:
    """Each connection sends so many bytes a second, for that time. Raises InjectedError if there is none."""

    def limit(rate: int) -> Callable[[socket.socket], None]:
        return lambda connection: connection.setsockopt(
            socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", min(rate, _UNLIMITED))
        )

    _for_a_time("slow_network", seconds, limit(bytes_per_s), limit(_UNLIMITED))


def deaf(seconds: float, share: float) -> None:
    """The kernel drops that share of the packets to each connection, for that time; TCP sends them again, after later ones. Raises
    InjectedError if there is no connection.
    """
    steps = [
        (_LOAD, 0, 0, _RANDOM),
        (_JUMP_IF_ABOVE, 0, 1, int(share * _UNLIMITED)),  # if above, the next one, else the one after that
        (_RETURN, 0, 0, _UNLIMITED),
        (_RETURN, 0, 0, 0),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("@HP", len(steps), ctypes.addressof(code))  # struct sock_fprog
    _for_a_time(
        "one_way_cut",
        seconds,
        lambda connection: connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program),
        lambda connection: connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0),
    )


def _for_a_time(
    fault: str, seconds: float, begin: Callable[[socket.socket], None], end: Callable[[socket.socket], None]
) -> None:
    if not _each(begin):
        raise InjectedError(f"{fault}: this rank has no TCP connection")
    # Connections that are closed meanwhile are not kept open, and those that are made meanwhile are as before anyway.
    timer = threading.Timer(seconds, _each, [end])
    timer.daemon = True
    timer.start()


def _each(act: Callable[[socket.socket], None]) -> int:
    """Does that to every TCP connection of this process; how many there are."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, not a socket, not connected, or it has no filter
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    connection.getpeername()
                    act(connection)
                    found += 1
    return found
