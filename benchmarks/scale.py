"""The control plane of a run with 104 to 20,000 ranks: seconds to start an attempt and to replace a failed one, memory, messages.

    python benchmarks/scale.py [--ranks 104 1000 4000 10000 20000] [--hosts 2] [--steady 10] [--lost 8] [--ray-only]

A private Ray with the real Supervisor, RestartLoop, Elasticity, Group and MemoryCheckpoints in this process, and the real
Coordinator and RunMonitor as actors. The nodes, with 8 ranks each, are simulated in `--hosts` more actors (scale_nodes.py), whose
agents keep the protocol: so every message is a real one. Not included: Ray Train's own work to place and start workers, the ranks'
own start, and the rows of node monitors (monitor.py --tree has these).

In this order, each from the attempt before: the start; some seconds of training; one rank dies, and all others lose a connection;
one node is cut off; 5% of the ranks die together; the head's processes (coordinator, monitor, GCS) are stopped for 5 s; half of the
nodes are cut off. That is a head that hangs, not one that is started again: after the loss of its head a cluster of Ray is another
one, the run ends, and the same command continues it (tests/end_to_end/test_nodes.py).

"ordered": seconds until the last agent had the order to train of the next attempt: for a death from the death, for a node that
was cut off from when the coordinator noticed it, `--lost` seconds after its last beat. "over": the same until the driver had
the result of the attempt; "placed": until nodes had fetched what single ranks read of the copy in memory (what all ranks read
they send each other after the order, which is not in these seconds); "first order". Processor time is that of the process in
these seconds. All share this machine's cores: on a cluster the simulated agents would not, so "control_cpu_s" has what the
driver, the coordinator and the monitor need together. "messages": to the coordinator, beats included, over control connections
or, as "messages by Ray", through Ray; the other counts are of the calls in them (of `next` and `ended` one a rank), and of the
driver's calls of memory stores. `--ray-only`: no control connections.

Prints a table over the sizes and draws it (docs/images/scale.svg). A size that fails is in the result with what failed: what breaks
first beyond the largest one that holds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray

sys.path.insert(0, str(Path(__file__).parent))
from common import write
from scale_cluster import Cluster
from scale_nodes import PER_NODE, Host
from scale_plot import draw, table

from raydist.cluster.run import coordinator
from raydist.cluster.run.request import Request
from raydist.cluster.run.supervisor import Supervisor
from raydist.cluster.session import Session, open_session, worker_environment
from raydist.records import Event
from raydist.run.directory import SPEC, RunDir
from raydist.run.log import read_events
from raydist.spec import JobSpec, stored

ROLES = {
    "coordinator": "ray::Coordinator",
    "monitor": "ray::RunMonitor",
    "GCS": "gcs_server",
    "raylet": "raylet/raylet",
    "simulated nodes": "ray::Host",
}
CONTROL = "driver", "coordinator", "monitor"
PAUSE_S = 5.0
WAIT_S = 600.0


class View:
    """Shows nothing but notes."""

    def update(self, snapshot: Any) -> None:
        """Nothing."""

    def event(self, event: Event) -> None:
        """Notes and decisions."""
        if event.kind in ("note", "decision", "failure"):
            print(
                "   ",
                event.kind,
                {k: str(v)[:100] for k, v in event.data.items() if v and k != "traceback"},
                flush=True,
            )

    def note(self, text: str) -> None:
        """A message."""
        print("    message:", text, flush=True)


class Processes:
    """The control processes of this run: their processor time and memory."""

    def __init__(self) -> None:
        self.all = {"driver": [psutil.Process()]} | {role: [] for role in ROLES}
        for process in psutil.Process().children(recursive=True):
            line = " ".join(process.cmdline())
            for role, name in ROLES.items():
                if name in line:
                    self.all[role].append(process)

    def cpu(self) -> dict[str, float]:
        """Seconds of processor time so far."""
        return {role: sum(sum(p.cpu_times()[:2]) for p in each) for role, each in self.all.items()}

    def uss(self) -> dict[str, int]:
        """MiB that only this process has."""
        return {role: sum(p.memory_full_info().uss for p in each) >> 20 for role, each in self.all.items()}

    def signal(self, number: int, *roles: str) -> None:
        """Sends a signal to these."""
        for role in roles:
            for process in self.all[role]:
                os.kill(process.pid, number)


class Run:
    """One run of `ranks` ranks. `measure()` returns the figures."""

    def __init__(self, ranks: int, session: Session, folder: str, options: argparse.Namespace) -> None:
        self.ranks, self.steady_s, self.attempt = ranks, options.steady, 0
        self.found: dict[str, Any] = {}
        """The figures so far."""
        self._sent: Counter[str] = Counter()
        host = ray.remote(Host).options(num_cpus=0, max_concurrency=100_000)
        hosts = [host.remote() for _ in range(options.hosts)]
        self.cluster = Cluster(ranks // PER_NODE, hosts, options.lost, "" if options.ray_only else "127.0.0.1")
        self.run = RunDir(f"{folder}/run-{ranks}")
        spec = JobSpec.model_validate(
            {
                "name": "scale",
                "data": {"source": "python-stdlib", "tokenizer": "bytes"},
                "train": {"steps": 1000, "global_batch": ranks, "micro_batch": 1},
                "cluster": {"workers": [ranks // 4, ranks], "gpus_per_worker": 1},
                "recovery": {"max_failures": -1, "backoff_s": 0.0},
                "observe": {"interval_s": None},
            }
        )
        self.run.storage.write(SPEC, stored(spec).encode())
        request = Request(spec, self.run, "", 1.0, exporters=[])
        with self.cluster.simulated():
            self.supervisor = Supervisor.build(request, replace(session, private=False), View())
        self.ending: Any = None

    def measure(self) -> dict[str, Any]:
        """Runs through all faults."""
        thread = threading.Thread(target=self._run, daemon=True)  # a size that fails ends no run
        begun, before = time.time(), self._no_cpu()
        thread.start()
        self._ordered(1, self.ranks)
        found = self.found
        found["start"] = self._phase(1, before, min)
        self.processes = Processes()
        found["steady"] = self._steady()
        found["one rank dies"] = self._after(lambda: self.cluster.call("die", [self.ranks // 2], True), self.ranks)
        found["one node is cut off"] = self._cut(1)
        five = range(0, self.living, 20)
        found["5% of the ranks die"] = self._after(lambda: self.cluster.call("die", [*five], True), self.living)
        found["the head stops for 5 s"] = self._pause()
        found["half of the nodes are cut off"] = self._cut(self.cluster.count // 2)
        found["memory_mib"] = self.processes.uss()
        self.cluster.call("finish")
        thread.join(WAIT_S)
        events = [event.kind for event in read_events(self.run)]
        found["attempts"], found["seconds"] = events.count("attempt_started"), round(time.time() - begun, 1)
        found["ending"] = self.ending.status if self.ending else None
        self.cluster.close()
        return found

    # --- inside

    def _run(self) -> None:
        with self.cluster.simulated():
            self.ending = self.supervisor.run(signals=False)

    @property
    def living(self) -> int:
        """Ranks on nodes that are not cut off."""
        return self.ranks - PER_NODE * len(self.cluster.gone)

    def _no_cpu(self) -> dict[str, float]:
        return dict.fromkeys(("driver", *ROLES), 0.0) | {"driver": sum(psutil.Process().cpu_times()[:2])}

    def _ordered(self, attempt: int, ranks: int) -> list[dict[str, Any]]:
        """Waits until all agents have the order to train of that attempt. What the hosts have seen."""
        deadline = time.monotonic() + WAIT_S
        while True:
            seen = self.cluster.call("seen")
            if sum(s["orders"].get(attempt, (0,))[0] for s in seen) >= ranks:
                self.attempt = attempt
                return seen
            if time.monotonic() > deadline or self.ending is not None:
                raise TimeoutError(f"attempt {attempt}: {[s['orders'] for s in seen]}, {self.ending}")
            time.sleep(0.2)

    def _phase(
        self, attempt: int, before: dict[str, float], since: Callable[..., float], at: float = 0.0
    ) -> dict[str, Any]:
        """Seconds and processor time of the start of an attempt, from `at`, or from when the agents joined."""
        seen = self.cluster.call("seen")
        begun = at or since(s["joined"] for s in seen)
        last = max(s["orders"][attempt][2] for s in seen if attempt in s["orders"])
        first = min(s["orders"][attempt][1] for s in seen if attempt in s["orders"])
        cpu = {role: round(spent - before.get(role, 0.0), 2) for role, spent in Processes().cpu().items()}
        times = {"ordered_s": round(last - begun, 2), "first_order_s": round(first - begun, 2)}
        job = json.loads(next(s["orders"][attempt][3] for s in seen if attempt in s["orders"]))
        if job["incident"] is not None:
            over = {"over_s": job["incident"]["over"], "placed_s": job["begun"]}
            times = {**{name: round(at - begun, 2) for name, at in over.items()}, **times}
        control = round(sum(cpu[role] for role in CONTROL), 2)
        return {**times, "control_cpu_s": control, "cpu_s": cpu, "messages": self._messages(seen)}

    def _messages(self, seen: list[dict[str, Any]]) -> dict[str, int]:
        """Of each kind, since this was called last."""
        sent: Counter[str] = sum((Counter(s["messages"]) for s in seen), Counter())
        new, self._sent = sent - self._sent, sent
        return {name: count for name, count in sorted(new.items()) if count > 1}

    def _after(self, fault: Callable[[], list[float]], ranks: int) -> dict[str, Any]:
        before = self.processes.cpu()
        self._messages(self.cluster.call("seen"))
        at = min(fault())
        self._ordered(self.attempt + 1, ranks)
        return self._phase(self.attempt, before, min, at)

    def _cut(self, count: int) -> dict[str, Any]:
        """Cuts off some nodes, not that of rank 0. Ray knows them to be dead later."""
        usable = [name for name in self.cluster.names[1:] if name not in self.cluster.gone]
        gone = usable[len(usable) // 2 :][:count] if count == 1 else usable[:count]
        before = self.processes.cpu()
        self._messages(self.cluster.call("seen"))
        self.cluster.gone.update(gone)
        at = min(self.cluster.call("cut", gone))
        seen = self._ordered(self.attempt + 1, self.living)
        job = next(s["orders"][self.attempt][3] for s in seen if self.attempt in s["orders"])
        noticed = json.loads(job)["incident"]["seen"]
        found = self._phase(self.attempt, before, min, noticed)
        self.cluster.dead.update(gone)
        return {"noticed_s": round(noticed - at, 2), **found}

    def _steady(self) -> dict[str, Any]:
        self._messages(self.cluster.call("seen"))
        before, begun = self.processes.cpu(), time.monotonic()
        time.sleep(self.steady_s)
        seen, seconds = self.cluster.call("seen"), time.monotonic() - begun
        sent = self._messages(seen)
        share = {role: round((spent - before[role]) / seconds, 3) for role, spent in self.processes.cpu().items()}
        count = {name: sent.get(name, 0) for name in ("messages", "beat", "next", "push")}
        return {
            "messages_s": {name: round(n / seconds, 1) for name, n in count.items()},
            "messages_s_of_a_node": round(count["messages"] / seconds / (self.living // PER_NODE), 3),
            "bytes": {name: n for s in seen for name, n in s["bytes"].items()},
            "longest_beat_s": round(max(s["longest_beat_s"] for s in seen), 2),
            "cores": share,
            "memory_mib": self.processes.uss(),
        }

    def _pause(self) -> dict[str, Any]:
        """Stops the head's processes, as if its host had been suspended; no agent may be lost by that."""
        roles = ("coordinator", "monitor", "GCS")
        attempt = self.attempt
        self.processes.signal(signal.SIGSTOP, *roles)
        time.sleep(PAUSE_S)
        self.processes.signal(signal.SIGCONT, *roles)
        begun, before = time.monotonic(), self.processes.cpu()
        self.cluster.call("seen")
        time.sleep(0.5)
        # Until beats are answered at once again.
        while max(s["longest_beat_s"] for s in self.cluster.call("seen")) > 1.0 and time.monotonic() - begun < WAIT_S:
            time.sleep(0.5)
        spent = self.processes.cpu()["coordinator"] - before["coordinator"]
        new = max(n for s in self.cluster.call("seen") for n in s["orders"]) - attempt
        return {
            "answers_again_s": round(time.monotonic() - begun, 2),
            "coordinator_cpu_s": round(spent, 2),
            "new_attempts": new,
        }


def main() -> None:
    """Prints the figures of each size and a table, writes results/scale.json and docs/images/scale.svg."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[104, 1000, 4000, 10_000, 20_000])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--steady", type=float, default=10.0)
    parser.add_argument("--lost", type=float, default=coordinator.LOST_S)
    parser.add_argument("--ray-only", action="store_true", help="no control connections")
    options = parser.parse_args()
    found = {}
    for ranks in options.ranks:
        assert ranks % PER_NODE == 0, f"--ranks {ranks}: give a multiple of {PER_NODE}"
        with tempfile.TemporaryDirectory(dir=os.getcwd()) as folder:
            here = str(Path(__file__).parent)
            with open_session(
                "local", env=worker_environment(), log_dir=Path(folder, "logs"), python_path=[here]
            ) as session:
                run = Run(ranks, session, folder, options)
                try:
                    found[str(ranks)] = run.measure()
                except TimeoutError as error:
                    found[str(ranks)] = {**run.found, "failed": str(error)[:500]}
                    run.cluster.close()
        print(ranks, found[str(ranks)], flush=True)
        asked = {"load": os.getloadavg(), "lost_s": options.lost}
        path = write("scale", {**asked, "ranks": found})
    print(table(found))
    print(path, draw(found))


if __name__ == "__main__":
    main()
