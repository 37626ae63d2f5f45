"""GPU errors: each new one is a finding with its meaning; errors from before the run are not."""

from __future__ import annotations

from typing import Any

from raydist.diagnosis import Diagnosis


def row(gpu: int = 0, rank: int | None = None, **values: Any) -> dict[str, Any]:
    who = {"at": 1.0, "kind": "gpu", "host": "h1", "node": "10.0.0.1", "gpu": gpu}
    return {**who, **({"rank": rank} if rank is not None else {}), **values}


def test_what_is_new_is_told() -> None:
    """A finding has GPU, host, rank and remedy: for a program's error to examine the program, for a hardware error to drain the
    node."""
    diagnosis = Diagnosis()
    assert not list(diagnosis.observe([row(gpu_xid_count=0, gpu_ecc_errors=7), row(1)]))
    (found,) = diagnosis.observe([row(rank=3, gpu_xid_count=1, gpu_xid=31, gpu_ecc_errors=7)])
    assert (found.rule, found.rank, found.severity, found.figures["kind"]) == ("gpu_errors", 3, "warning", "xid 31")
    assert found.what == "GPU 0 on h1 (10.0.0.1) of rank 3: XID 31, a kernel accessed unmapped memory"
    assert "CUDA_LAUNCH_BLOCKING" in found.remedy
    both = list(diagnosis.observe([row(gpu_xid_count=3, gpu_xid=95, gpu_ecc_errors=9)]))
    assert [(f.figures["kind"], f.figures["count"], f.severity) for f in both] == [
        ("xid 95", 2, "critical"),
        ("ecc", 2, "critical"),
    ]
    assert all("drain" in f.remedy for f in both)
    assert not list(diagnosis.observe([row(gpu_xid_count=3, gpu_xid=95, gpu_ecc_errors=9)]))


def test_an_agent_that_began_anew_counts_anew() -> None:
    """After an agent's restart its first error is a finding, although the previous count was higher; so is an unknown XID."""
    diagnosis = Diagnosis()
    assert len(list(diagnosis.observe([row(gpu_xid_count=2, gpu_xid=79)]))) == 1
    assert not list(diagnosis.observe([row(gpu_xid_count=0)]))
    (found,) = diagnosis.observe([row(gpu_xid_count=1, gpu_xid=999)])
    assert found.what == "GPU 0 on h1 (10.0.0.1): XID 999"
    assert found.severity == "critical"
