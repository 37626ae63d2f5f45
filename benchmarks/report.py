"""Cost of `raydist report` for a long run of many ranks: processor time, memory, the size of the page, and its time in Chromium.

    python benchmarks/report.py [--steps 1000000] [--ranks 1000] [--readings 240]

The run is written with raydist's own writers; each rank has --readings readings. One loss is an outlier: the page must draw it. Of
the page at 1400 x 900, `readable` is until it is loaded, `drawn` until the charts in the view are drawn and shown, `all` until the
page has been scrolled through, screen by screen, each time until its charts are shown; `jump`: from a jump to the end of the page
until the charts there are shown; `cpu`: of the browser's main thread. The last of 3.
"""

from __future__ import annotations

import argparse
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1]))
from common import write

from raydist.records import Event, StepRecord
from raydist.run.directory import SPEC, RunDir
from raydist.run.driver_process import this_process
from raydist.run.log_writer import SEGMENT_ROWS, RunLog
from raydist.run.status import write_state
from raydist.run.telemetry_log import SEGMENT_ROWS as ROWS_AT_ONCE
from raydist.run.telemetry_log import TelemetryLog
from tests.report.html import looks
from tests.report.html.chromium import Chromium

SECONDS = 0.3
"""Duration of a step."""
SPIKE = 100.0


def record(step: int, ranks: int, odd: int) -> dict[str, Any]:
    """A step record; losses fall, except the outlier at step `odd`."""
    loss = SPIKE if step == odd else 2 + 8 * math.exp(-step / 50_000) + 0.05 * math.sin(step)
    return StepRecord(
        step,
        loss,
        1e-3,
        1 + 0.3 * math.sin(3 * step),
        4_000_000,
        SECONDS,
        0.001,
        ranks,
        1,
        "0" * 16,
        samples=1000,
    ).to_dict()


def reading(at: float, rank: int, step: int) -> dict[str, Any]:
    """A reading of a rank on a GPU, after `step` steps."""
    return {
        "at": at, "kind": "rank", "host": f"h{rank // 8}", "node": f"10.0.0.{rank // 8}", "rank": rank, "attempt": 1, "step": step,
        "forward_seconds": 0.1 * step, "backward_seconds": 0.19 * step, "data_seconds": 0.001 * step, "all_reduce_count": step,
        "all_reduce_bytes": step << 20, "all_reduce_seconds": 0.05 * step, "all_reduce_exposed_seconds": 0.02 * step,
        "gpu_process_bytes": (40 << 30) + (rank * step) % (1 << 30),
    }  # fmt: skip


def make(run: RunDir, steps: int, ranks: int, readings: int) -> None:
    """Writes the run's folder."""
    begun = time.time() - steps * SECONDS
    run.storage.write(SPEC, f"train: {{steps: {steps}}}\n".encode())
    log = RunLog(run)
    log.event(Event("attempt_started", begun, {"attempt": 1, "world_size": ranks, "resume_step": 0}))
    first = {"attempt": 1, "step": 1, "seconds": SECONDS, "stages": {}, "repeated_steps": 0}
    log.event(Event("first_step", begun + SECONDS, first))
    for start in range(1, steps + 1, SEGMENT_ROWS):
        log.steps(record(step, ranks, steps // 3) for step in range(start, min(start + SEGMENT_ROWS, steps + 1)))
        log.flush()
    log.event(Event("ended", begun + steps * SECONDS, {"status": "finished", "step": steps}))
    log.close()
    samples = TelemetryLog(run)
    samples._thinned_at = math.inf  # raw rows without downsampling: more than a real run ever has
    rows: list[dict[str, Any]] = []
    for i in range(1, readings + 1):
        step = steps * i // readings
        rows += [reading(begun + step * SECONDS, rank, step) for rank in range(ranks)]
        if len(rows) >= ROWS_AT_ONCE or i == readings:
            samples.add(rows)
            samples.flush()
            rows = []
    write_state(run, {"status": "finished", "heartbeat_at": time.time(), "driver": this_process(), "step": steps})


_SHOWN = """
(async () => {
    const frame = () => new Promise((go) => requestAnimationFrame(() => setTimeout(go)));
    const shown = (one) => !raydist.seen(one) || one.drawing && !one.stale;
    const drawn = async () => {
        do await frame(); while (!window.raydist || ![...raydist.charts.values()].every(shown));
    };
    await drawn();
    %s
    return [...raydist.charts.values()].every((one) => one.drawing);
})()
"""
_JUMP = "scrollTo(0, document.documentElement.scrollHeight); await drawn();"
_SCROLL = (
    "for (let y = 0; y < document.documentElement.scrollHeight; y += innerHeight) { scrollTo(0, y); await drawn(); }"
)


def opened(page: Path, folder: Path) -> dict[str, Any]:
    """What the page takes in Chromium, and whether the outlier is in its first chart."""
    found: dict[str, Any] = {}
    (folder / "profile").mkdir()
    with Chromium(folder / "profile") as browser:
        browser.page("Performance.enable", timeDomain="threadTicks")
        for _ in range(3):
            browser.open("about:blank")
            browser.open(page, 1400)
            browser.value(_SHOWN % "")
            begun = time.monotonic()
            browser.value(_SHOWN % _JUMP)
            found["jump_s"] = round(time.monotonic() - begun, 2)
            browser.open("about:blank")
            begun = time.monotonic()
            browser.open(page, 1400)
            for name, until in (("readable", "true"), ("drawn", _SHOWN % ""), ("all", _SHOWN % _SCROLL)):
                found["all_drawn"] = browser.value(until)
                spent = {one["name"]: one["value"] for one in browser.page("Performance.getMetrics")["metrics"]}
                found |= {
                    f"{name}_s": round(time.monotonic() - begun, 2),
                    f"{name}_cpu_s": round(spent["TaskDuration"], 2),
                }
        return found | {"spike_drawn": browser.value(f"Math.max(...{looks.LOSS}.chart.series[0].y)") == SPIKE}


def main() -> None:
    """Runs the report, prints and writes results/report.json."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--readings", type=int, default=240)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(Path(folder) / "long")
        make(run, options.steps, options.ranks, options.readings)
        page = Path(folder) / "report.html"
        begun = time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "raydist", "report", run.uri, "-o", str(page)], check=True, stdout=subprocess.DEVNULL
        )
        wall, used = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        size, shown = page.stat().st_size, opened(page, Path(folder))
    result = {
        **vars(options),
        "wall_s": round(wall, 2),
        "cpu_s": round(used.ru_utime + used.ru_stime, 2),
        "most_memory_mb": round(used.ru_maxrss / 1024),
        "page_mb": round(size / 1e6, 2),
        **shown,
    }
    print(result)
    print(write("report", result))


if __name__ == "__main__":
    main()
