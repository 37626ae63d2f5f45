"""Makes the images of README and docs: `python docs/screenshots.py`, from a real run of about a minute in which a rank is killed.

docs/images/report.png is the top of the page that `raydist report` writes, as Chromium shows it; dashboard.png and
dashboard-phone.png that of `raydist dashboard`, on a wide screen and on a phone. docs/images/recovery.svg is what `raydist train`
printed around the fault, drawn by rich. The folder of the run is ~, and this machine's address is 10.0.0.1. Needs chromium.
"""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import walk
from rich.console import Console
from rich.text import Text

sys.path.append(str(Path(__file__).parents[1]))
from tests.report.html import looks
from tests.report.html.chromium import Chromium

IMAGES = Path(__file__).parent / "images"
MOST_BYTES = 200_000
WIDTH, HEIGHT = 1200, 1000
WIDE, PHONE = (1400, 1000), (400, 900)
"""Sizes of the images of the dashboard."""
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
        with Chromium(made(home / "profile"), online=True) as browser:
            browser.open(page, WIDTH, HEIGHT)
            photograph(browser, IMAGES / "report.png")
            dashboard(browser, home)
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


def dashboard(browser: Chromium, home: Path) -> None:
    """The page of the run as the server of `raydist dashboard` shows it."""
    command = [sys.executable, "-m", "raydist", "dashboard", "runs", "--port", "0"]
    server = subprocess.Popen(command, cwd=home, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    try:
        address = server.stdout.readline().strip()
        browser.open(address)
        browser.until("location.search === ''")
        for (width, height), name in ((WIDE, "dashboard.png"), (PHONE, "dashboard-phone.png")):
            browser.open(address.partition("/?")[0] + "/run/0/survivor?smooth=20", width, height)
            browser.until("!document.getElementById('doctor').innerText.includes('being examined')")
            browser.value("document.querySelector('.path').textContent = '~/runs/survivor'")
            photograph(browser, IMAGES / name)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()
        server.stdout.close()


def photograph(browser: Chromium, image: Path) -> None:
    """The top of the open page, with its charts."""
    browser.until(looks.DRAWN)
    image.write_bytes(base64.b64decode(browser.page("Page.captureScreenshot")["data"]))


def made(folder: Path) -> Path:
    """The folder, which is created."""
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
