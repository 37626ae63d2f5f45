"""Where chaos.py trains: this machine, or a cluster of four hosts in network namespaces that a thread repairs after faults."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from raydist.run.directory import RunDir
from raydist.run.log import read_events
from raydist.run.status import last_word
from tests.hosts import Cluster, Host, Hosts, close_templates
from tests.processes import command_line

CUT_S = 12.0
"""How long a network is cut: long enough for the run to give up the node."""
DRAINED_S = 20.0
"""Time from the drain notice until a node is removed; it then returns as a new node."""


class Here:
    """This machine, with a private Ray."""

    address = "local"

    def run(self, command: list[str], folder: Path) -> tuple[int, str]:
        """Exit code and stderr."""
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        return done.returncode, done.stderr

    def repair(self) -> None:
        """Does nothing: each command starts a Ray of its own."""

    def close(self) -> None:
        """Does nothing."""


class Net:
    """A cluster of four hosts: a head without CPUs, and three nodes with one CPU each. A thread repairs it after faults."""

    def __init__(self) -> None:
        self.hosts = Hosts(4)
        self.hosts.__enter__()
        self.cluster = Cluster(self.hosts, size=1, cpus=0)
        self.cluster.__enter__()
        for host in self.nodes:
            self.cluster.add_node(host, cpus=1, plain=True)
        self.address = self.cluster.address
        self.cuts: list[int] = []
        """Steps at which the network of a rank's host is cut."""
        self.moves: list[int] = []
        """Steps at which the head is lost; its cluster is then started again at another address."""
        self.done: list[dict[str, Any]] = []
        """The cuts and moves that have happened."""
        self.watched: RunDir | None = None
        self._drained: dict[float, tuple[Host, str]] = {}
        """Time of the drain notice -> host and id, of the draining nodes that still exist."""
        self._seen = 0.0
        self._headless = False
        self._starts = 0
        """Attempts that had trained when the head came back. It is lost again after another only: a starting command needs it."""
        self._mending = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._mend, daemon=True)
        self._thread.start()

    @property
    def nodes(self) -> list[Host]:
        """All hosts except the driver's."""
        return list(self.hosts)[1:]

    def run(self, command: list[str], folder: Path) -> tuple[int, str]:
        """Exit code and stderr, on the head."""
        env = {**os.environ, **self.cluster.environment, "RAY_AUTH_MODE": "token", "GLOO_SOCKET_IFNAME": "eth0"}
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = self.hosts[0].popen(command, cwd=str(folder), env=env, **pipes)
        told = process.communicate()[1]
        return process.returncode, told

    def repair(self) -> None:
        """After the driver has ended: a head that was lost is started again at another port, and its nodes join it."""
        with self._mending:
            if self._headless:
                self.cluster.restart(1, port=int(self.address.rpartition(":")[2]) + 1)
                for host in self.nodes:
                    self.cluster.add_node(host, cpus=1, plain=True)
                self.address, self._headless, self._starts = self.cluster.address, False, self._begun()

    def close(self) -> None:
        """Ends all hosts."""
        self._ended.set()
        self._thread.join()
        self.cluster.close()
        self.hosts.close()
        close_templates()  # of the head's processes

    def _mend(self) -> None:
        cut: Host | None = None
        healed = 0.0
        while not self._ended.wait(0.3):
            with self._mending:
                if cut is not None and (self._headless or time.monotonic() > healed):
                    self.hosts.heal(cut)
                    self.hosts.undeafen(cut)
                    cut = None
                if self._headless:
                    continue
                self._take_drained()
                living = self.cluster.node_ids()
                for host in self.nodes:
                    if host.name not in living and host is not cut:
                        self.cluster.add_node(host, cpus=1, plain=True)
                if cut is None and self._due(self.moves) and self._begun() > self._starts:
                    self.done.append({"fault": "move_head", "rank": "-", "step": self.moves.pop(0)})
                    self._lose_head()
                elif cut is None and self._due(self.cuts):
                    told = [e for e in read_events(self.watched) if e.kind == "workers"][-1].data["workers"]
                    cut = next(host for host in self.nodes if host.name == told[-1]["host"])
                    deaf = sum(one["fault"] != "move_head" for one in self.done) % 2 == 1
                    name = "deafen_host" if deaf else "cut_network"
                    self.done.append({"fault": name, "rank": told[-1]["rank"], "step": self.cuts.pop(0)})
                    (self.hosts.deafen if deaf else self.hosts.cut)(cut)
                    healed = time.monotonic() + CUT_S

    def _lose_head(self) -> None:
        self._headless = True
        for process in self.hosts[0].processes().values():
            if "gcs_server" in command_line(process):
                process.kill()

    def _take_drained(self) -> None:
        nodes, hosts = self.cluster.node_ids(), {host.name: host for host in self.nodes}
        ranks: dict[int, str] = {}
        for event in read_events(self.watched) if self.watched is not None and self.watched.exists() else []:
            if event.kind == "workers":
                ranks = {worker["rank"]: worker["host"] for worker in event.data["workers"]}
            elif event.kind == "fault" and event.data["fault"] == "drain" and event.at > self._seen:
                self._seen = event.at
                name = ranks[event.data["rank"]]
                self._drained[event.at] = hosts[name], nodes.get(name, "")
        for at, (host, node) in list(self._drained.items()):
            if time.time() - at > DRAINED_S:
                del self._drained[at]
                if nodes.get(host.name) == node:
                    self.cluster.kill_node(host)

    def _due(self, steps: list[int]) -> bool:
        """Whether the run has reached the first of them."""
        return self.watched is not None and bool(steps) and (last_word(self.watched) or {"step": 0})["step"] >= steps[0]

    def _begun(self) -> int:
        """The number of attempts that have trained a step."""
        events = read_events(self.watched) if self.watched is not None and self.watched.exists() else []
        return sum(event.kind == "first_step" for event in events)
