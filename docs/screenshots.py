"""Makes the two images of README: `python docs/screenshots.py`, from a real run of about a minute in which a rank is killed.

docs/images/report.png is the top of the page that `raydist report` writes, as Chromium shows it. docs/images/recovery.svg is what
`raydist train` printed around the fault, drawn by rich. The folder of the run is ~, and this machine's address is 10.0.0.1.
Needs chromium.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import walk
from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
MOST_BYTES = 200_000
WIDTH, HEIGHT = 1200, 1000
COLUMNS = 120
BEFORE, AFTER = 5, 12
"""Lines of the output that are shown before and after the fault."""

JOB = """
name: survivor
model: {name: gpt, layers: 2, width: 64, heads: 2, context: 64}
data: {source: python-stdlib, tokenizer: bytes}
train: {steps: 600, global_batch: 16, micro_batch: 8, seed: 17}
optim: {name: adamw, lr: 3.0e-3, schedule: {name: cosine, warmup: 0.1}}
checkpoint: {every: 200}
eval: {every: 200, batches: 8}
recovery: {snapshot_every: 20}
cluster: {workers: 2, cpus_per_worker: 1, gpus_per_worker: auto}
"""
FAULTS = "- {fault: kill, rank: 1, step: 350, phase: backward}\n"


def main() -> None:
    """Trains, and writes both images."""
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="raydist-screenshots-") as folder:
        home = Path(folder).resolve()
        (home / "job.yaml").write_text(JOB)
        (home / "faults.yaml").write_text(FAULTS)
        (home / "runs" / ".data").mkdir(parents=True)
        printed = raydist(home, "train", "job.yaml", "--faults", "faults.yaml")
        raydist(home, "report", "survivor", "-o", "report.html")
        draw(around(walk.shown(printed, home, most=None).split("\n")), IMAGES / "recovery.svg")
        page = home / "report.html"
        page.write_text(page.read_text(encoding="utf-8").replace(str(home), "~"), encoding="utf-8")
        photograph(page, home / "profile", IMAGES / "report.png")
    for image in sorted(IMAGES.iterdir()):
        size = image.stat().st_size
        print(f"{image}: {size:,} bytes")
        if size > MOST_BYTES:
            sys.exit(f"{image} has {size:,} bytes, more than {MOST_BYTES:,}: make the window smaller")


def raydist(home: Path, *arguments: str) -> str:
    """What a command printed. Raises CalledProcessError if it failed."""
    environment = os.environ | {"HOME": str(home), "COLUMNS": "140"}
    command = [sys.executable, "-m", "raydist", *arguments]
    done = subprocess.run(
        command, cwd=home, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.stdout.decode(errors="replace")


def around(lines: list[str]) -> list[str]:
    """The lines around the fault."""
    (fault,) = [i for i, line in enumerate(lines) if line.startswith("injected at")]
    return lines[max(0, fault - BEFORE) : fault + AFTER + 1]


def draw(lines: list[str], image: Path) -> None:
    """The lines as a terminal would show them, without the web fonts that rich asks for."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in lines:
        line = line if len(line) <= COLUMNS else f"{line[: COLUMNS - 3]}..."
        style = "bold red" if "failed" in line or line.startswith("injected") else ""
        console.print(Text(line, style=style or ("bold green" if line.startswith("resumed") else "")))
    svg = console.export_svg(title="raydist train job.yaml --faults faults.yaml")
    image.write_text(re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL), encoding="utf-8")


def photograph(page: Path, profile: Path, image: Path) -> None:
    """The top of a page, as Chromium shows it."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
    options += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={image.resolve()}", page.as_uri()]
    subprocess.run(["chromium", *options], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
