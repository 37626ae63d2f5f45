"""`raydist bench comm`: wrong options are refused at once, in one line; and how results are shown."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from raydist.cli import bench
from raydist.cli.main import app
from raydist.errors import DataError, SpecError, UsageError
from raydist.report.comm import show


def call(*arguments: str) -> Any:
    """The command; its exceptions are not caught."""
    return CliRunner().invoke(bench.app, ["comm", *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--op", "all_reduced"], UsageError, "operation 'all_reduced'"),
        (["--dtype", "fp8"], UsageError, "type 'fp8'"),
        (["--min-bytes", "lots"], UsageError, "--min-bytes lots"),
        (["--max-bytes", "1KiB", "--min-bytes", "2KiB"], UsageError, "sizes from 2048 to 1024"),
        (["--max-bytes", "99999999TiB"], UsageError, "give at most 64GiB, the limit"),
        (["--set", "optim.lr=1"], UsageError, "--set without a job"),
        (["--factor", "1"], UsageError, "factor 1"),
        (["none.yaml"], SpecError, "none.yaml"),
        (["JOB", "--set", "parallel.bucket_mb=-1"], SpecError, "parallel.bucket_mb"),
        (["JOB", "--set", "parallel.bucket_mb=automatic"], SpecError, "parallel.bucket_mb"),
        (["JOB", "--set", "data.path=nowhere", "--set", "data.source=null"], DataError, "--vocab"),
    ],
)
def test_refused(tmp_path: Path, arguments: list[str], error: type[Exception], message: str) -> None:
    """Invalid options and jobs are refused before Ray starts, with exit code 2."""
    job = tmp_path / "job.yaml"
    job.write_text("data: {source: none}\ntrain: {steps: 1}\n")
    with pytest.raises(error, match=message) as caught:
        call(*[str(job) if a == "JOB" else a for a in arguments])
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]


def test_one_rank_is_refused() -> None:
    """The option itself refuses it."""
    done = CliRunner().invoke(app, ["bench", "comm", "--workers", "1"])
    assert done.exit_code == 2
    assert "--workers" in done.output


def told(n: int) -> dict[str, Any]:
    """The measurements of `n` ranks on two nodes."""
    row = {"op": "all_reduce", "size": 4096, "count": 1024, "type": "fp32", "iterations": 20, "min": 1e-5, "median": 2e-5,
           "p99": 3e-5, "algbw": 2.048e8, "busbw": 3.072e8, "wrong": 7}  # fmt: skip
    matrix = [[0.0 if a == b else 1e-4 * (a + b) for b in range(n)] for a in range(n)]
    return {
        "world_size": n,
        "backend": "gloo",
        "notes": ["device cpu: torch sees no CUDA device"],
        "ranks": [{"node_ip": f"10.0.0.{r % 2}"} for r in range(n)],
        "collectives": [row],
        "pairs": {"between": "ranks", "names": [f"rank {r}" for r in range(n)], "latency": matrix, "bandwidth": matrix},
        "fit": {"alpha": 1e-4, "beta": 1e-9, "residual": 0.05},
        "gradients": {
            "bytes": 2**22,
            "measured": 0.01,
            "measured_bytes": 2**21,
            "predicted": {"tree": 0.02, "ring": 0.005},
        },
        "bucket": {"bucket_mb": 2.0, "because": "2 MiB: it is faster"},
        "nccl": [
            {"size": size, "algorithm": algorithm, "protocol": protocol, "seconds": 1e-5, "measured": measured}
            for size, algorithm, protocol, measured in (
                (2**10, "Tree", "LL", 1e-5),
                (2**14, "Tree", "LL", 5e-5),
                (2**26, "Ring", "Simple", 2e-5),
            )
        ],
    }


def test_shown_whole_on_a_narrow_pipe() -> None:
    """The columns of nccl-tests, one line per row; the matrix; the worst pair by name; the algorithms, fastest first."""
    out = StringIO()
    show(told(3), Console(file=out, width=40, highlight=False))
    lines = out.getvalue().splitlines()
    assert lines[0] == "3 ranks on 2 nodes, gloo"
    at = next(i for i, line in enumerate(lines) if "busbw" in line)
    assert lines[at].split() == ["size", "count", "type", "iters", "min", "time", "p99", "algbw", "busbw", "#wrong"]
    row = ["all_reduce", "4096", "1024", "fp32", "20", "10.0", "20.0", "30.0", "0.205", "0.307", "7"]
    assert lines[at + 2].split() == row
    text = out.getvalue()
    assert "latency between ranks, us: 100 to 300; the worst between rank 1 and rank 2" in text
    matrix = next(line for line in lines if line.strip().startswith("rank 1 ") and "-" in line)
    assert matrix.split() == ["rank", "1", "100", "-", "300"]
    assert text.index("ring") < text.index("tree") < text.index("measured")
    assert "for 2 MiB of it" in text
    assert "would choose 2 MiB: it is faster" in text
    assert "  Tree, LL       for 1,024 to 16,384 bytes on 2 nodes\n  Ring, Simple   for 67,108,864" in text
    assert "16,384 bytes took 5.0 times as long as expected: compare with NCCL_ALGO=Tree raydist bench" in text
