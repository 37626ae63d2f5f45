"""The options of `raydist bench comm`, validated before anything starts.

Runs anywhere. Plain python: no torch, no ray.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from raydist.errors import UsageError

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv")
DTYPES = ("fp32", "bf16")
MOST = 64 << 30
"""Bytes of one collective."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What to measure. Raises UsageError for invalid values.

    `least`, `most`: sizes in bytes, in steps of `factor`. `gradients`: bytes of a model's gradients, None without a model. `job`: a
    spec as plain values, whose ddp buckets are tried, with a vocabulary of `vocab`. `gpus`: per rank; None: as available.
    """

    ops: Sequence[str] = OPS
    dtypes: Sequence[str] = ("fp32",)
    least: int = 2**10
    most: int = 256 * 2**20
    factor: int = 4
    iterations: int = 20
    gradients: int | None = None
    job: Mapping[str, Any] | None = None
    vocab: int = 0
    gpus: float | None = None
    threads: int = 1
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for what, asked, known in (("operation", self.ops, OPS), ("type", self.dtypes, DTYPES)):
            for name in asked:
                if name not in known:
                    raise UsageError(f"{what} {name!r}: there is none of that name", f"take of: {', '.join(known)}")
            if not asked:
                raise UsageError(f"no {what} to measure", f"take of: {', '.join(known)}")
        if not 4 <= self.least <= self.most:
            raise UsageError(
                f"sizes from {self.least} to {self.most} bytes",
                "give a least of 4 or more, and a most that is no smaller",
            )
        if self.most > MOST:
            raise UsageError(f"sizes up to {self.most} bytes", f"give at most {MOST >> 30}GiB, the limit")
        for name, least in (("factor", 2), ("iterations", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} {getattr(self, name)}", f"give {least} or more")


def read(config: Mapping[str, Any]) -> Ask:
    """An Ask from plain values. Raises UsageError for an unknown name."""
    known = [f.name for f in fields(Ask)]
    for name in config:
        if name not in known:
            raise UsageError(f"nothing here is called {name!r}", f"take of: {', '.join(known)}")
    return Ask(**config)
