"""The prometheus exporter and deploy/grafana: a real Prometheus scrapes a real Ray, and every query of the dashboard is run."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest

from raydist.cluster.run.root_cause import Kind
from raydist.cluster.session import open_session
from raydist.observe.exporters import prometheus
from raydist.observe.monitor_actor import start_monitor
from raydist.records import Event, StepRecord
from raydist.run.directory import RunDir, begin_attempt
from raydist.run.log import read_events
from raydist.run.telemetry_schema import OPS, PHASES
from tests import needs
from tests.ports import free_ports

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "raydist.json"


class Prometheus:
    """A Prometheus that scrapes `target` every 250 ms, with its data in `folder`."""

    def __init__(self, folder: Path, target: str) -> None:
        config = folder / "prometheus.yml"
        config.write_text(
            "global: {scrape_interval: 250ms, scrape_timeout: 250ms}\n"
            f"scrape_configs: [{{job_name: ray, static_configs: [{{targets: ['{target}']}}]}}]\n"
        )
        place = f"127.0.0.1:{free_ports(1)[0]}"
        self._url = f"http://{place}/api/v1/"
        flags = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={place}"]
        with (folder / "prometheus.log").open("w") as log:
            self.process = subprocess.Popen(["prometheus", *flags], stdout=log, stderr=log)

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The current result of a query. Raises AssertionError with Prometheus's message if the query is invalid."""
        try:
            with urlopen(f"{self._url}query?{urlencode({'query': expression})}", timeout=60) as answer:
                found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return found
        except HTTPError as error:
            if error.code == 503:
                return []  # it is still starting
            raise AssertionError(f"{expression}: {error.read().decode()}") from None
        except OSError:  # also a time limit, or a connection that is reset
            assert self.process.poll() is None, "Prometheus ended"
            return []

    def until(self, expression: str, holds: Callable[[list[dict[str, Any]]], bool] = bool) -> list[dict[str, Any]]:
        deadline = time.monotonic() + 120
        while not holds(found := self.ask(expression)):
            assert time.monotonic() < deadline, f"{expression}: {found}"
            time.sleep(0.1)
        return found


class Job:
    """A training run as its monitor sees it: two ranks, with one step and two samples at a time."""

    def __init__(self, run: RunDir) -> None:
        import ray

        self._get = ray.get
        chosen = [{"name": "prometheus", "options": {}}]
        self.monitor = start_monitor(run.uri, interval_s=0.1, exporters=chosen)
        self.step = 0
        failure = {"attempt": 1, "rank": 0, "cause": "x", "fault": "worker_died", "traceback": "", "echoes": 0}
        capacity = {"flops_per_token": 1e6, "peak_flops": 1e10}
        held_out = {"step": 0, "loss": 3.25, "seconds": 1.0}
        events = [Event("capacity", 1.0, capacity), Event("failure", 1.0, failure), Event("eval", 1.0, held_out)]
        self._get(self.monitor.push.remote([], [event.to_dict() for event in events]))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self) -> None:
        while not self._stop.wait(0.1):
            self.step += 1
            row = StepRecord(self.step, 2.5, 1e-3, 0.5, 1000, 0.5, 0.01, 2, 1, "0").to_dict()
            samples = [
                {
                    "kind": "rank", "rank": rank, "node": "10.0.0.1", "attempt": 1, "at": time.time(), "step": self.step,
                    **{f"{phase}_seconds": 0.1 * self.step for phase in PHASES},
                    **{f"{kind}_bytes": 1000 + rank for kind in prometheus.MEMORY},
                    **{f"{op}_{what}": 3 * self.step for op in OPS for what in ("bytes", "seconds", "exposed_seconds")},
                }
                for rank in (0, 1)
            ]  # fmt: skip
            self._get(self.monitor.push.remote([row], []))
            self._get(self.monitor.observe.remote(samples))

    def end(self) -> None:
        """Stops training; `step` is the last one."""
        self._stop.set()
        self._thread.join()

    def close(self) -> None:
        """Ends its monitor: the driver, this process, goes on, so that a monitor that is killed leaves its records for the next."""
        self.end()
        self._get(self.monitor.end.remote("finished"))


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, Job]]:
    """A job on a private Ray that exports metrics every second, and a Prometheus that found it by the run's own note."""
    needs.require("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    run = RunDir(folder / "a-run")
    begin_attempt(run, 1)
    env = {"RAY_metrics_report_interval_ms": "1000"}
    root = str(Path(__file__).parents[2])
    with open_session("local", env=env, log_dir=folder / "logs", python_path=[root], metrics_port=0):
        job = Job(run)
        try:
            deadline, found = time.monotonic() + 120, None
            while not found:
                notes = [str(e.data["text"]) for e in read_events(run) if e.kind == "note"]
                found = next(
                    (m for text in notes if (m := re.search(r"metrics are at http://(\S+)/metrics", text))), None
                )
                assert time.monotonic() < deadline, notes
                time.sleep(0.05)
            made = Prometheus(folder, found[1])
            try:
                yield made, job
            finally:
                made.process.kill()
                made.process.wait()
        finally:
            job.close()


def queries() -> tuple[list[str], list[str]]:
    """All queries of the dashboard's panels and of its annotations, with Grafana's variables replaced."""
    board = json.loads(DASHBOARD.read_text())
    panels = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    annotations = [each["expr"] for each in board["annotations"]["list"]]
    made = [
        [text.replace("$__rate_interval", "5s").replace("$run", ".*") for text in of] for of in (panels, annotations)
    ]
    return made[0], made[1]


def test_the_dashboard_shows_a_running_job(scraped: tuple[Prometheus, Job]) -> None:
    """Every query is valid, and those of the panels return data; annotations may be empty without a restart or a finding."""
    prometheus, _ = scraped
    panels, annotations = queries()
    assert len(panels) >= 10
    for expression in panels:
        prometheus.until(expression)
    for expression in annotations:
        prometheus.ask(expression)
    variable = json.loads(DASHBOARD.read_text())["templating"]["list"][1]["definition"]
    name = re.fullmatch(r"label_values\((\w+), run\)", variable)
    assert name
    assert {found["metric"]["run"] for found in prometheus.until(name[1])} == {"a-run"}


def test_the_figures_are_the_job_s(scraped: tuple[Prometheus, Job]) -> None:
    """After the job has stopped, names, labels and values are as documented: the reported sums, and no other series."""
    prometheus_, job = scraped
    job.end()
    tokens = prometheus_.until(
        "ray_raydist_tokens_total", lambda found: [f["value"][1] for f in found] == [str(1000 * job.step)]
    )
    assert tokens[0]["metric"]["run"] == "a-run"
    expected = {
        "ray_raydist_step": {(): job.step},
        "ray_raydist_loss_nats": {(): 2.5},
        "ray_raydist_eval_loss_nats": {(): 3.25},
        "ray_raydist_learning_rate": {(): 1e-3},
        "ray_raydist_grad_norm": {(): 0.5},
        "ray_raydist_step_seconds": {("0",): 0.5},
        "ray_raydist_mfu_ratio": {(): 1000 / 0.5 * 1e6 / 1e10},
        "ray_raydist_restarts_total": {("worker_died",): 1},
        "ray_raydist_memory_bytes": {(str(rank), kind): 1000 + rank for rank in (0, 1) for kind in prometheus.MEMORY},
        "ray_raydist_comm_bytes_total": {(str(rank), op): 3 * job.step for rank in (0, 1) for op in OPS},
        "ray_raydist_comm_seconds_total": {(str(rank), op): 3 * job.step for rank in (0, 1) for op in OPS},
        "ray_raydist_comm_exposed_seconds_total": {(str(rank),): 3 * job.step * len(OPS) for rank in (0, 1)},
    }  # fmt: skip
    labels = {f"ray_{name}": found[1:] for name, (_, found) in (prometheus.GAUGES | prometheus.COUNTERS).items()}
    for name, right in expected.items():

        def are_right(made: list[dict[str, Any]], name: str = name, right: Any = right) -> bool:
            got = {tuple(m["metric"][label] for label in labels[name]): float(m["value"][1]) for m in made}
            return len(made) == len(right) and bool(got == pytest.approx(right))

        prometheus_.until(name, are_right)  # it may be exported and scraped after the tokens


def test_a_finding_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not counted again when it changes or is over."""
    counted = []
    monkeypatch.setattr(prometheus.Exporter, "__init__", lambda self: None)
    monkeypatch.setattr(
        prometheus.Exporter, "_add", lambda self, name, value, **labels: counted.append((name, value, labels))
    )
    exporter = prometheus.Exporter()  # type: ignore[call-arg]
    for state in ("new", "changed", "over"):
        exporter.event({"kind": "finding", "rule": "slow_link", "severity": "warning", "state": state})
    assert counted == [("raydist_findings_total", 1, {"rule": "slow_link", "severity": "warning"})]


def test_causes_are_recovery_s() -> None:
    """The label `cause` has the kinds of failures of recovery, and `other`."""
    assert set(prometheus.CAUSES) == set(get_args(Kind))


def test_every_name_is_documented_and_shown() -> None:
    """Each metric, with its scraped name and labels, is in docs/how-to/exporters.md and in a panel of the dashboard."""
    text, asked = (
        (DASHBOARD.parents[2] / "docs/how-to/exporters.md").read_text(),
        " ".join(each for of in queries() for each in of),
    )
    for name, (_, labels) in (prometheus.GAUGES | prometheus.COUNTERS).items():
        assert re.search(
            rf"^\| `ray_{name}` \| {', '.join(f'`{label}`' for label in labels)} \|", text, re.MULTILINE
        ), name
        assert re.search(rf"\bray_{name}\b", asked), name
