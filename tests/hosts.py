"""Several hosts on one machine, for tests: each has its own network, processes, name, /run, /tmp and /dev/shm.

A host is a set of namespaces with one process in it, its init, which waits for end of file on a pipe that the test process holds.
The links lead to a bridge in a separate network namespace: the machine's network is neither used nor changed, and two test runs
never conflict. Names, addresses and ports need no coordination, so they are the same in every run.

Nothing is left behind: when an init exits, by `close` or because the test process exited in any way, the kernel kills all
processes of its host, and removes mounts, links and namespaces with the last of them.

All hosts see the machine's files, as on NFS, except /run, /dev/shm and TMPDIR, which are separate for each host. Needs iproute2
and util-linux, and root or the right to create user namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from raydist.cluster import ray_worker
from raydist.launch import fork_server, zygote
from tests import host_zygotes, needs

NETWORK = "10.77.0"
"""Prefix of each host's address; the addresses exist only in the hosts' own network."""

WATCHFUL = {"RAY_health_check_period_ms": "250", "RAY_health_check_timeout_ms": "3000"}
"""For a Cluster's `env`: its head detects a killed node after 1 to 2 s, and an unreachable one after 16; by default after 15, 65.
raydist itself detects an unreachable node after 8 to 10 s."""
LEAN = {
    # As in raydist's own Ray (raydist/cluster/session.py): the raylet finds its object store without a second's sleep.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
    # By default 30 s, which a busy machine may need.
    "RAY_gcs_server_port_wait_time_s": "120",
    # Statistics that no test reads.
    "RAY_enable_metrics_collection": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
    "RAY_event_stats": "0",
    # Ray gives its workers niceness 15: beside other load on the machine they would hardly run.
    "RAY_worker_niceness": "0",
    # By default a node starts one process a CPU at a time: here a run's actors and workers would wait for one another.
    "RAY_worker_maximum_startup_concurrency": "4",
    # On a busy machine a raylet needs longer than 30 s, after which `ray start` fails.
    "RAY_raylet_start_wait_time_s": "150",
    "RAY_agent_register_timeout_ms": "240000",
}
"""Settings of Ray's processes that make a cluster start sooner, and need less CPU time."""

_BURST, _LATENCY = "128kb", "50ms"
_GSO = {"128kb": 65536, "16kb": 14000}
"""Burst -> bytes that TCP gives to a link at once: less than the burst, with the headers of each packet. 65536: the default."""
_NOBODY = "02:00:00:00:ff:ff"  # the switch knows all addresses, and drops frames for this one
_OWN_TMP, _OWN_RAY = "/run/tmp", "/run/ray"
_ENTERED = ("--net", "--uts", "--ipc", "--mount", "--pid")

_INIT = """
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 1777 /run/tmp
mkdir /run/ray /run/cgroup
mount -t tmpfs -o mode=1777,size=1g tmpfs /dev/shm
# /sys/class/net is that of the network which was there at mounting.
mount --rbind /sys/fs/cgroup /run/cgroup
mount -t sysfs sysfs /sys
mount --rbind /run/cgroup /sys/fs/cgroup
printf '%s' "$HOSTS_FILE" > /run/hosts
mount --bind /run/hosts /etc/hosts
hostname "$NAME"
trap '' CHLD  # kept by what follows: the kernel reaps orphans by itself
echo ready
exec cat > /dev/null
"""


class Process(subprocess.Popen[str]):
    """A process of a host. `pid` and `inner` are numbered as on this machine, and signals go to `inner`.

    The process that was started here only waits for the one in the host, and exits with the same status.
    """

    @property
    def inner(self) -> psutil.Process:
        """The process in the host; raises psutil.NoSuchProcess once it has exited."""
        outer = psutil.Process(self.pid)
        while not (children := outer.children()):
            if self.poll() is not None:
                raise psutil.NoSuchProcess(self.pid)
            time.sleep(0.001)  # it forks at once
        return children[0]

    def send_signal(self, sig: int) -> None:
        """Signals the process in the host; does nothing if it has exited."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.inner.send_signal(sig)
            if sig == signal.SIGCONT:
                os.kill(self.pid, sig)  # it stopped together with the inner process


class _Namespaces:
    """Namespaces and their init. `owner`: if given, they are created in its user namespace."""

    def __init__(self, script: str, env: Mapping[str, str], owner: _Namespaces | None = None) -> None:
        unshare = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--mount-proc"]
        command = [*unshare, *needs.MAP_ROOT] if owner is None else [*owner.entering(), *unshare]
        self._outer = subprocess.Popen(
            [*command, "sh", "-c", script],
            env={**os.environ, **env}, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert self._outer.stdout is not None
        if self._outer.stdout.readline() != "ready\n":
            _, why = self._outer.communicate()
            raise OSError(f"cannot make a host: {why.strip()}")
        process = psutil.Process(self._outer.pid)
        while children := process.children():  # nsenter and unshare each wait for the process that they forked
            (process,) = children
        self.init = process.pid

    def entering(self, *namespaces: str) -> list[str]:
        """The command prefix that runs a command in these namespaces."""
        user = ("--user", "--preserve-credentials") if needs.MAP_ROOT else ()
        return ["nsenter", "--target", str(self.init), *user, *namespaces]

    def network(self, tool: str, *lines: str) -> None:
        """Runs these lines with `ip`, `bridge` or `tc` in this network."""
        command = [*self.entering("--net"), tool, "-batch", "-"]
        done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{tool}: {done.stderr.strip()} in\n" + "\n".join(lines))

    def end(self) -> None:
        """Sends SIGKILL to all of its processes at once; returns when the last has exited."""
        if self._outer.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init, signal.SIGKILL)
        self._outer.communicate()


class Host:
    """One of several hosts: `name` and `ip` are its own, and other hosts reach it by them."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self._hosts, self.number = hosts, number
        self.name, self.ip = f"host{number}", f"{NETWORK}.{number + 1}"
        self.mac = f"02:00:00:00:00:{number + 1:02x}"
        self._inside: _Namespaces | None = None
        self._processes: list[Process] = []
        self._network = -1  # keeps the network while connections of killed processes are being closed
        self.zygotes: frozenset[int] = frozenset()
        """Pids, as on this machine, of the tests' own processes in it (tests/host_zygotes.py)."""

    @property
    def up(self) -> bool:
        """Whether it is running."""
        return self._inside is not None

    def boot(self) -> None:
        """Starts it, with a working link; name and address are the same each time."""
        assert not self.up, f"{self.name} runs"
        self._unplug()
        table = "".join(f"{h.ip} {h.name}\n" for h in self._hosts)
        env = {"NAME": self.name, "HOSTS_FILE": f"127.0.0.1 localhost\n::1 localhost\n{table}"}
        self._inside = inside = _Namespaces(_INIT, env, self._hosts.switch)
        self._network = os.open(f"/proc/{inside.init}/ns/net", os.O_RDONLY)
        port, limit = self._port, f"root tbf rate {self._hosts.rate} burst {self._hosts.burst} latency {_LATENCY}"
        limited = self._hosts.rate is not None
        self._hosts.switch.network(
            "ip",
            f"link add {port} type veth peer name eth0 address {self.mac} netns {inside.init}",
            f"link set {port} master switch up",
            f"link set {port} type bridge_slave learning off flood off",
        )
        self._hosts.switch.network("bridge", f"fdb replace {self.mac} dev {port} master static")
        if limited:
            self._hosts.switch.network("tc", f"qdisc add dev {port} {limit}")
        # What is longer than the burst, tbf cuts into packets of 1.5 kB, on the processor of the sender: a card would do it.
        inside.network(
            "ip",
            "link set lo up",
            f"link set eth0 up gso_max_size {_GSO[self._hosts.burst]}",
            f"addr add {self.ip}/24 brd + dev eth0",
        )
        if limited:
            inside.network("tc", f"qdisc add dev eth0 {limit}")
        for other in self._hosts:
            if other is not self:
                self._see(other, other.mac)

    def popen(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **kwargs: Any) -> Process:
        """Starts a command in this host. `env`: the whole environment (default: this process's); TMPDIR is the host's own."""
        assert self._inside is not None, f"{self.name} is off"
        whole = {**(os.environ if env is None else env), "TMPDIR": _OWN_TMP}
        cwd = os.path.abspath(kwargs.pop("cwd", None) or os.getcwd())
        entering = [*self._inside.entering(*_ENTERED), f"--wdns={cwd}", "--"]
        process = Process([*entering, *command], env=whole, text=True, **kwargs)
        self._processes.append(process)
        return process

    def run(
        self, command: Sequence[str], *, input: str = "", timeout: float = 240, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in this host to its end. Raises subprocess.TimeoutExpired, after killing the command.

        Daemons that the command leaves are not waited for. Output goes to files, since a pipe stays open until the last daemon
        exits.
        """
        with (
            tempfile.TemporaryFile("w+") as given,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            given.write(input)
            given.seek(0)
            process = self.popen(command, stdin=given, stdout=out, stderr=err, **kwargs)
            try:
                code = process.wait(timeout)
            except BaseException:
                process.kill()
                process.wait()
                raise
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(command, code, out.read(), err.read())

    def processes(self) -> dict[int, psutil.Process]:
        """All processes of this host but its zygotes, by the pid that they have there, which raydist's records use."""
        assert self._inside is not None, f"{self.name} is off"
        mine = os.stat(f"/proc/{self._inside.init}/ns/pid").st_ino
        found = {}
        for process in psutil.process_iter():
            if process.pid in self.zygotes:
                continue
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.stat(f"/proc/{process.pid}/ns/pid").st_ino == mine:
                    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                    number = next(line for line in lines if line.startswith("NSpid:")).split()[-1]
                    found[int(number)] = process
        return found

    def fork_zygotes(self, templates: Sequence[host_zygotes.Template]) -> None:
        """Gives it a zygote of each of these, if it has none."""
        assert self._inside is not None, f"{self.name} is off"
        if not self.zygotes:
            self.zygotes = frozenset(each.fork(self._inside.init, bool(needs.MAP_ROOT)) for each in templates)

    def kill(self) -> None:
        """SIGKILL to every process at once. The kernel keeps running, so it closes or resets their connections."""
        self.zygotes = frozenset()
        if self._inside is not None:
            inside, self._inside = self._inside, None
            for process in self._processes:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGCONT)  # a stopped process would not notice the end
            inside.end()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._processes.clear()

    def power_off(self) -> None:
        """`kill`, and in addition the network drops everything: peers do not even see connections close."""
        if self.up:
            self._unplug()
        self.kill()

    @property
    def _port(self) -> str:
        return f"to-{self.name}"

    def _unplug(self) -> None:
        if self._network >= 0:
            self._hosts.switch.network("ip", f"link del {self._port}")
            os.close(self._network)
            self._network = -1

    def _see(self, other: Host, mac: str) -> None:
        """Sets a permanent ARP entry for another host. Hosts never send ARP requests: across a cut no host could answer."""
        if self._inside is not None and self._network >= 0:
            self._inside.network("ip", f"neigh replace {other.ip} lladdr {mac} nud permanent dev eth0")


class Hosts:
    """`n` hosts on one switch, as a context manager. `rate` is each link's in either direction, in the notation of `tc`; None:
    unlimited. `burst`: bytes that a link sends at once after it was idle, in the same notation: one of `_GSO`.

    hosts[0].run(["ping", hosts[1].name]). Raises needs.Missing where this machine does not allow creating hosts.
    """

    def __init__(self, n: int, rate: str | None = "1gbit", burst: str = _BURST) -> None:
        self.rate, self.burst = rate, burst
        self._hosts = [Host(self, i) for i in range(n)]

    def __enter__(self) -> Hosts:
        needs.require(*needs.HOSTS)
        with contextlib.ExitStack() as stack:
            self.switch = _Namespaces("trap '' CHLD; echo ready; exec cat > /dev/null", {})
            stack.callback(self.close)
            self.switch.network("ip", "link add switch type bridge stp_state 0", "link set switch up")
            for host in self._hosts:
                host.boot()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, number: int) -> Host:
        return self._hosts[number]

    def close(self) -> None:
        """Kills all hosts; returns when every process has exited."""
        for host in self._hosts:
            host.kill()
            if host._network >= 0:
                os.close(host._network)
                host._network = -1
        self.switch.end()

    def cut(self, a: Host, b: Host | None = None) -> None:
        """No packet passes between the two hosts any more, or between `a` and all others. Connections are neither closed nor
        reset.

        With `a` only, its link goes down as with a pulled cable, and packets in transit are lost. For a pair, packets already
        queued on the link still arrive.
        """
        if b is None:
            self.switch.network("ip", f"link set {a._port} down")
        else:
            a._see(b, _NOBODY)
            b._see(a, _NOBODY)

    def deafen(self, host: Host) -> None:
        """No packet reaches the host any more; what it sends arrives. As with `cut` nothing is closed or reset."""
        for other in self:
            if other is not host:
                other._see(host, _NOBODY)

    def undeafen(self, host: Host) -> None:
        """Undoes `deafen`."""
        for other in self:
            if other is not host:
                other._see(host, host.mac)

    def heal(self, a: Host, b: Host | None = None) -> None:
        """Undoes `cut` of the same hosts."""
        if b is None:
            self.switch.network("ip", f"link set {a._port} up")
        else:
            a._see(b, b.mac)
            b._see(a, a.mac)


class Cluster:
    """A Ray cluster on the first `size` hosts (default: all), as a context manager; its head is on host 0.

    `cpus`: the number that Ray assumes for each node. `env` is added to the environment of Ray's own processes. `address` is
    HOST:PORT; `environment` is what a client needs: the cluster requires a token, as Ray does wherever a token file exists.
    Workers and fork servers are forked (tests/host_zygotes.py), but for those of a node that is added as a `plain` one.
    """

    def __init__(
        self,
        hosts: Hosts,
        *,
        cpus: int = 1,
        size: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts, self._cpus = hosts, cpus
        self._size = len(hosts) if size is None else size
        self.address = f"{hosts[0].ip}:6379"
        self.environment = {"RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated environment
        own = {"RAY_AUTH_MODE": "token", "PATH": path}
        self._plain = {**clean, **LEAN, **self.environment, **own, **(env or {})}
        self._templates = templates({**clean, **LEAN, **self.environment, **own})
        self._env = dict(self._plain)
        for each in self._templates:
            self._env |= each.variables
        self._watch: Process | None = None

    def restart(self, size: int, port: int = 6379) -> None:
        """All hosts lose power, then the first `size` of them form a cluster again, whose head has that port."""
        self.close()
        self._size, self.address = size, f"{self.hosts[0].ip}:{port}"
        self.__enter__()

    def start_head(self) -> None:
        """Starts a head on host 0. Nodes that had another head know nothing of it."""
        port = self.address.rpartition(":")[2]
        head = ("--head", f"--port={port}", f"--temp-dir={_OWN_RAY}", "--include-dashboard=false")
        self._start(self.hosts[0], *head)

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self.start_head()
            self._watch = self.hosts[0].popen(
                [sys.executable, "-m", "tests.hosts", self.address],
                cwd=Path(__file__).parents[1], env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            with ThreadPoolExecutor() as threads:  # half of a start is waiting
                list(threads.map(self._join, list(self.hosts)[1 : self._size]))
            self.wait_until(lambda: len(self.node_ids()) == self._size)
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills all hosts, and with them all of Ray."""
        for host in self.hosts:
            host.kill()

    def nodes(self) -> dict[str, tuple[str, bool]]:
        """The nodes that Ray's head knows now: node id -> (address, alive); a node that came back has a new id."""
        watch = self._watch
        assert watch is not None
        assert watch.stdin is not None
        assert watch.stdout is not None
        watch.stdin.write("\n")
        watch.stdin.flush()
        line = watch.stdout.readline()
        assert line, "Ray's head does not answer"
        return {node: (ip, alive) for node, (ip, alive) in json.loads(line).items()}

    def node_ids(self) -> dict[str, str]:
        """The nodes that are alive: host name -> Ray's node id."""
        names = {host.ip: host.name for host in self.hosts}
        return {names[ip]: node for node, (ip, alive) in self.nodes().items() if alive}

    def add_node(self, host: Host, *, cpus: int | None = None, plain: bool = False) -> str:
        """Adds a host as a node (boots it if it is off); returns its id once Ray's head reports it alive. `plain`: its workers and
        fork servers start as on a user's cluster, below its raylet."""
        self._join(host, cpus, plain)
        self.wait_until(lambda: host.name in self.node_ids())
        return self.node_ids()[host.name]

    def make_whole(self) -> None:
        """Adds each host that is no node now, so that every host is one."""
        lost = [host for host in self.hosts if host.name not in self.node_ids()]
        for host in self.hosts:
            if not host.up and host not in lost:
                self.wait_until(lambda host=host: host.name not in self.node_ids())  # type: ignore[misc]
                lost.append(host)
        for host in lost:
            host.kill()
            self.add_node(host)

    def describe(self) -> str:
        """The state of Ray, for the message of a failed test: its nodes, and what its head has logged about lost ones."""
        search = (
            "grep -hiE 'health check|dead|unreachable|lost' /run/ray/session_latest/logs/gcs_server.out | tail -n 30"
        )
        logged = self.hosts[0].run(["sh", "-c", search]).stdout
        return f"Ray's nodes: {self.nodes()}\nIts head's log:\n{logged}"

    def kill_node(self, host: Host) -> None:
        """All processes of the host die at once. The head notices later: use `wait_until`."""
        host.kill()

    def wait_until(self, true: Callable[[], bool], timeout: float = 240) -> None:
        """Waits for a state of Ray. Raises TimeoutError with the nodes' states."""
        deadline = time.monotonic() + timeout
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not in {timeout:g} s; Ray's nodes are {self.nodes()}")
            time.sleep(0.2)  # each iteration queries the head again

    def _join(self, host: Host, cpus: int | None = None, plain: bool = False) -> None:
        self._start(host, f"--address={self.address}", cpus=cpus, plain=plain)

    def _start(self, host: Host, *options: str, cpus: int | None = None, plain: bool = False) -> None:
        if not host.up:
            host.boot()
        if not plain:
            host.fork_zygotes(self._templates)
        program = [sys.executable, "-m", "tests.hosts", "start"] if plain else forked_ray()
        command = [
            *program, *options, f"--node-ip-address={host.ip}",
            f"--num-cpus={self._cpus if cpus is None else cpus}", "--object-store-memory=100000000", "--disable-usage-stats",
            "--include-log-monitor=false", "--no-monitor",  # a second of CPU time each: nothing reads the logs, or adds nodes
        ]  # fmt: skip
        env = self._plain if plain else self._env
        done = host.run(command, cwd=Path(__file__).parents[1], env=env, timeout=240)
        assert "Ray runtime started" in done.stdout, done.stdout + done.stderr


def forked_ray() -> list[str]:
    """The first words of a `ray start` on a host that has zygotes."""
    return [sys.executable, host_zygotes.__file__, host_zygotes.COMMAND, __file__, "start"]


_TEMPLATES: list[host_zygotes.Template] = []


def templates(env: Mapping[str, str]) -> list[host_zygotes.Template]:
    """Of Ray workers, and of fork servers; started once, in an environment like this one, and ended by `close_templates`."""
    if not _TEMPLATES:
        # As in ray_worker.start_zygote; each host's init has that pid.
        ray = {"RAY_JOB_ID": ray_worker.NO_JOB, "RAY_RAYLET_PID": "1"}
        _TEMPLATES.append(
            host_zygotes.Template(
                f"{ray_worker.__name__}:serve",
                ray_worker.PRELOAD,
                ray_worker.VARIABLE,
                {**ray_worker.DEFAULTS, **env, **ray},
            )
        )
        servers = f"{fork_server.__name__}:serve", fork_server.PRELOAD, zygote.VARIABLE
        _TEMPLATES.append(host_zygotes.Template(*servers, {**fork_server.VARIABLES, **env}))
    return _TEMPLATES


def template_pids() -> set[int]:
    """The templates' processes."""
    return {each.pid for each in _TEMPLATES}


def close_templates() -> None:
    """At the end of the test session."""
    while _TEMPLATES:
        _TEMPLATES.pop().close()


def _watch(address: str) -> None:
    """For each line on stdin, prints the nodes as one line of JSON."""
    from ray._raylet import GcsClient

    client = GcsClient(address=address)
    for _ in sys.stdin:
        nodes = client.get_all_node_info(timeout=30).values()
        print(json.dumps({n.node_id.hex(): (n.node_manager_address, n.state == 0) for n in nodes}), flush=True)


def _ray(whole: bool) -> None:
    """Ray's command line, without a server for Ray's client; workers and the runtime-env agent are forked where the host has a
    zygote for them. Unless `whole`, no host has a dashboard or its agents, and a raylet waits for no agent: it would end if a busy
    machine takes more than 30 s to start them."""
    from ray._private.node import Node
    from ray.scripts.scripts import main

    from raydist.cluster.local_ray import DASHBOARD_AGENT, RUNTIME_ENV_AGENT, prepared_agents
    from raydist.cluster.ray_private import services

    start, start_process = Node.start_raylet, services.start_ray_process

    def starting(node: Any, *args: Any, **options: Any) -> None:
        if ray_worker.VARIABLE in os.environ:
            node._ray_params.setup_worker_path = host_zygotes.__file__
            services.start_ray_process = starting_process
        with contextlib.nullcontext() if whole else prepared_agents(node, on_demand=(DASHBOARD_AGENT,), metrics=False):
            start(node, *args, **options)

    def starting_process(command: list[str], *args: Any, **options: Any) -> Any:
        for number, text in enumerate(command):
            if text.startswith(RUNTIME_ENV_AGENT):
                _, _, *file = shlex.split(text.removeprefix(RUNTIME_ENV_AGENT))  # python -u
                forked = [sys.executable, host_zygotes.__file__, host_zygotes.AGENT, *file]
                command[number] = RUNTIME_ENV_AGENT + subprocess.list2cmdline(forked)
        return start_process(command, *args, **options)

    Node.start_raylet = starting
    Node.start_ray_client_server = lambda *_, **__: None
    if not whole:
        Node.start_api_server = lambda *_, **__: None
    main()


if __name__ == "__main__":
    if sys.argv[1] in ("start", "start-whole"):
        whole = sys.argv[1] != "start"
        sys.argv[1] = "start"
        _ray(whole)
    else:
        _watch(sys.argv[1])
