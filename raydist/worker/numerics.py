"""What decides the bits of a result beside the job: torch, the processor's instructions, its threads, the kind of GPU.

Runs in: each train worker. Torch, never ray. With `train.virtual_ranks` a run says where they differ between ranks, or from those
that wrote the checkpoint it resumes from: there the same bits are not to be expected.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

WHAT = {
    "torch": "version of torch",
    "instructions": "CPU instruction set",
    "processor": "CPU's vendor or its vector instructions (/proc/cpuinfo)",
    "threads": "number of threads (cluster.cpus_per_worker)",
    "gpu": "kind of GPU",
}
"""Each key of `own` in words."""
_VECTOR = ("sse", "ssse", "avx", "amx", "fma", "f16c", "asimd", "sve", "sme", "bf16", "i8mm", "svei8mm", "svebf16")
"""How the names of vector instructions begin, of x86 and of Arm."""


def own() -> dict[str, str]:
    """Of this process. `gpu` is empty where none is used."""
    return {
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processor": processor(Path("/proc/cpuinfo")),
        "threads": str(torch.get_num_threads()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_initialized() else "",  # type: ignore[no-untyped-call]
    }


@functools.cache
def processor(facts: Path) -> str:
    """The vendor, and a hash of the vector instructions: by these MKL and oneDNN choose kernels (AMX, AVX512-BF16, VNNI, SVE),
    where torch's own level is the same. Of the first processor in `facts`; empty if these cannot be read."""
    try:
        first = facts.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return ""
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    vendor = found.get("vendor_id") or found.get("CPU implementer", "")
    flags = (found.get("flags") or found.get("Features", "")).split()
    vector = " ".join(sorted(flag for flag in flags if flag.startswith(_VECTOR)))
    return f"{vendor} {xxhash.xxh32_hexdigest(vector.encode())}" if vector else vendor


def differences(workers: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each thing that differs between ranks. `workers`: what `own` says on each, and its `rank`."""
    lines = []
    for key, what in WHAT.items():
        ranks: dict[str, list[int]] = {}
        for worker in workers:
            ranks.setdefault(str(worker.get(key, "")), []).append(int(worker["rank"]))
        if len(ranks) > 1:
            found = "; ".join(f"{value or 'none'} on {_named(having)}" for value, having in ranks.items())
            lines.append(
                f"train.virtual_ranks: the {what} differs: {found}. The bits may depend on the number of workers"
            )
    return lines


def changed(before: Mapping[str, str]) -> list[str]:
    """A line for each thing that was another when a checkpoint was written; what it does not say is left out."""
    return [
        f"train.virtual_ranks: the {WHAT[key]} was {before[key] or 'none'} when the checkpoint was written, and is "
        f"{now or 'none'}. The bits may be others than those of a run without a restart"
        for key, now in own().items()
        if key in before and before[key] != now
    ]


def _named(ranks: Sequence[int]) -> str:
    some = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {some}"
