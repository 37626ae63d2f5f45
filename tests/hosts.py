"""Several hosts on one machine, for tests: each has its own network, processes, name, /run, /tmp and /dev/shm.

A host is a set of namespaces with one process in it, its init, which waits for the end of a pipe that the test process holds.
The links lead to a bridge in a network of its own, so the machine's network is neither used nor changed, and two test runs
never meet. Names, addresses and ports are free by construction, thus the same in every run.

Nothing can be left behind: once an init ends, by `close` or because the test process is gone, however it ended, the kernel
kills all processes of its host, and drops mounts, links and namespaces with the last of them.

All hosts see the machine's files, as on NFS; but for /run, /dev/shm and TMPDIR, which each has alone. Needs iproute2 and
util-linux, and root or the right to make user namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests import needs

NETWORK = "10.77.0"
"""Each host's address starts with it; nothing outside the hosts' own network ever sees one."""

WATCHFUL = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "3000"}
"""For a Cluster's `env`: its head misses a node that was killed after 5 s, and a silent one after 20; else after 15 and 65."""

_BURST, _LATENCY = "128kb", "50ms"
_NOBODY = "02:00:00:00:ff:ff"  # the switch knows all addresses, and drops what is sent to this one
_OWN_TMP, _OWN_RAY = "/run/tmp", "/run/ray"
_ENTERED = ("--net", "--uts", "--ipc", "--mount", "--pid")

_INIT = """
set -e
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 1777 /run/tmp
mkdir /run/ray /run/cgroup
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
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
    """A process of a host. `pid` and `inner` are as this machine numbers them, and signals go to `inner`.

    The process that was started here only waits for the one in the host, and ends as that one does.
    """

    @property
    def inner(self) -> psutil.Process:
        """The process in the host; raises psutil.NoSuchProcess once it has ended."""
        outer = psutil.Process(self.pid)
        while not (children := outer.children()):
            if self.poll() is not None:
                raise psutil.NoSuchProcess(self.pid)
            time.sleep(0.001)  # it forks at once
        return children[0]

    def send_signal(self, sig: int) -> None:
        """To the process in the host; nothing happens if it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.inner.send_signal(sig)
            if sig == signal.SIGCONT:
                os.kill(self.pid, sig)  # it has stopped with the other


class _Namespaces:
    """Namespaces and their init. `owner`: whose user namespace they are to be in, if there is one."""

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
        while children := process.children():  # nsenter and unshare each wait for what they have forked
            (process,) = children
        self.init = process.pid

    def entering(self, *namespaces: str) -> list[str]:
        """The command that runs what follows it in those namespaces."""
        user = ("--user", "--preserve-credentials") if needs.MAP_ROOT else ()
        return ["nsenter", "--target", str(self.init), *user, *namespaces]

    def network(self, tool: str, *lines: str) -> None:
        """`ip`, `bridge` or `tc` does those lines in this network."""
        command = [*self.entering("--net"), tool, "-batch", "-"]
        done = subprocess.run(command, input="\n".join(lines) + "\n", capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{tool}: {done.stderr.strip()} in\n" + "\n".join(lines))

    def end(self) -> None:
        """SIGKILL to all of its processes at once; returns when the last is gone."""
        if self._outer.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.init, signal.SIGKILL)
        self._outer.communicate()


class Host:
    """One of several hosts: `name` and `ip` are its own, and what the others know it by."""

    def __init__(self, hosts: Hosts, number: int) -> None:
        self._hosts, self.number = hosts, number
        self.name, self.ip = f"host{number}", f"{NETWORK}.{number + 1}"
        self.mac = f"02:00:00:00:00:{number + 1:02x}"
        self._inside: _Namespaces | None = None
        self._processes: list[Process] = []
        self._network = -1  # keeps the network while connections of killed processes say goodbye

    @property
    def up(self) -> bool:
        """Whether it runs."""
        return self._inside is not None

    def boot(self) -> None:
        """Start it, with a link that works; the name and the address are those that it always has."""
        assert not self.up, f"{self.name} runs"
        self._unplug()
        table = "".join(f"{h.ip} {h.name}\n" for h in self._hosts)
        env = {"NAME": self.name, "HOSTS_FILE": f"127.0.0.1 localhost\n::1 localhost\n{table}"}
        self._inside = inside = _Namespaces(_INIT, env, self._hosts.switch)
        self._network = os.open(f"/proc/{inside.init}/ns/net", os.O_RDONLY)
        port, limit = self._port, f"root tbf rate {self._hosts.rate} burst {_BURST} latency {_LATENCY}"
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
        inside.network("ip", "link set lo up", "link set eth0 up", f"addr add {self.ip}/24 brd + dev eth0")
        if limited:
            inside.network("tc", f"qdisc add dev eth0 {limit}")
        for other in self._hosts:
            if other is not self:
                self._see(other, other.mac)

    def popen(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **kwargs: Any) -> Process:
        """Start a command in this host. `env`: the whole environment (default: this process's); TMPDIR is the host's own."""
        assert self._inside is not None, f"{self.name} is off"
        whole = {**(os.environ if env is None else env), "TMPDIR": _OWN_TMP}
        cwd = os.path.abspath(kwargs.pop("cwd", None) or os.getcwd())
        entering = [*self._inside.entering(*_ENTERED), f"--wdns={cwd}", "--"]
        process = Process([*entering, *command], env=whole, text=True, **kwargs)
        self._processes.append(process)
        return process

    def run(
        self, command: Sequence[str], *, input: str = "", timeout: float = 60, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in this host to its end. Raises subprocess.TimeoutExpired, and then it is killed.

        Daemons that it leaves are not waited for: what is said goes to files, for a pipe would end with the last of them.
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
        """All that run in this host, by the number that they have there, which raydist's records give."""
        assert self._inside is not None, f"{self.name} is off"
        mine = os.stat(f"/proc/{self._inside.init}/ns/pid").st_ino
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.NoSuchProcess):
                if os.stat(f"/proc/{process.pid}/ns/pid").st_ino == mine:
                    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                    number = next(line for line in lines if line.startswith("NSpid:")).split()[-1]
                    found[int(number)] = process
        return found

    def kill(self) -> None:
        """SIGKILL to every process at once. Their connections are closed or reset by the kernel, which outlives them here."""
        if self._inside is not None:
            inside, self._inside = self._inside, None
            for process in self._processes:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGCONT)  # one that was stopped would not see the end
            inside.end()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        pipe.close()
        self._processes.clear()

    def power_off(self) -> None:
        """`kill`, after which nothing is heard of it, not even the end of a connection."""
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
        """Where frames for another host go. They never ask for each other's address: nobody could answer across a cut."""
        if self._inside is not None and self._network >= 0:
            self._inside.network("ip", f"neigh replace {other.ip} lladdr {mac} nud permanent dev eth0")


class Hosts:
    """`n` hosts on one switch, for the time of a `with` block. `rate` is each link's in either direction, as `tc` writes it;
    None: as fast as this machine.

    hosts[0].run(["ping", hosts[1].name]). Raises needs.Missing where this machine does not let one make hosts.
    """

    def __init__(self, n: int, rate: str | None = "1gbit") -> None:
        self.rate = rate
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
        """Kill them all; returns when every process is gone."""
        for host in self._hosts:
            host.kill()
            if host._network >= 0:
                os.close(host._network)
                host._network = -1
        self.switch.end()

    def cut(self, a: Host, b: Host | None = None) -> None:
        """No packet passes between two hosts any more, or between `a` and all. Connections are neither closed nor reset.

        Alone, `a` loses its link as by a pulled cable, with what is on the wire. Of a pair, what was already queued for the
        link when this is called still arrives.
        """
        if b is None:
            self.switch.network("ip", f"link set {a._port} down")
        else:
            a._see(b, _NOBODY)
            b._see(a, _NOBODY)

    def heal(self, a: Host, b: Host | None = None) -> None:
        """Undo `cut` of the same hosts."""
        if b is None:
            self.switch.network("ip", f"link set {a._port} up")
        else:
            a._see(b, b.mac)
            b._see(a, a.mac)


class Cluster:
    """A Ray cluster on the first `size` hosts (default: all) for the time of a `with` block; its head is on host 0.

    `cpus`: what Ray is told that each node has. `env` is added to the environment of Ray's own processes. `address` is
    HOST:PORT; `environment` is what a client needs: the cluster asks for a token, as one does wherever a token file is.
    """

    def __init__(
        self, hosts: Hosts, *, cpus: int = 1, size: int | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.hosts, self._cpus = hosts, cpus
        self._size = len(hosts) if size is None else size
        self.address = f"{hosts[0].ip}:6379"
        self.environment = {"RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
        clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # as in an activated environment
        # Ray gives its workers niceness 15: beside anything else that the machine does they would hardly run.
        own = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0", "PATH": path}
        self._env = {**clean, **self.environment, **own, **(env or {})}
        self._watch: Process | None = None

    def restart(self) -> None:
        """All hosts lose power, and make a cluster again."""
        self.close()
        self.__enter__()

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            self._start(self.hosts[0], "--head", "--port=6379", f"--temp-dir={_OWN_RAY}", "--dashboard-host=0.0.0.0")
            self._watch = self.hosts[0].popen(
                [sys.executable, "-m", "tests.hosts", self.address],
                cwd=Path(__file__).parents[1], env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            for number in range(1, self._size):
                self.add_node(self.hosts[number])
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all hosts, and with them all of Ray."""
        for host in self.hosts:
            host.kill()

    def nodes(self) -> dict[str, tuple[str, bool]]:
        """What Ray's head knows now: node id -> (address, whether it lives); a node that came back has a new id."""
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
        """The living nodes: host name -> Ray's node id."""
        names = {host.ip: host.name for host in self.hosts}
        return {names[ip]: node for node, (ip, alive) in self.nodes().items() if alive}

    def add_node(self, host: Host, *, cpus: int | None = None) -> str:
        """Make a host, which is booted if it is off, a node; its id once Ray's head says that it lives."""
        self._start(host, f"--address={self.address}", cpus=cpus)
        self.wait_until(lambda: host.name in self.node_ids())
        return self.node_ids()[host.name]

    def kill_node(self, host: Host) -> None:
        """All processes of the host die at once. The head hears of it when it does: `wait_until`."""
        host.kill()

    def wait_until(self, true: Callable[[], bool], timeout: float = 60) -> None:
        """Wait for something that Ray will do. Raises TimeoutError with the nodes' states."""
        deadline = time.monotonic() + timeout
        while not true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not in {timeout:g} s; Ray's nodes are {self.nodes()}")
            time.sleep(0.05)  # the head is asked anew

    def _start(self, host: Host, *options: str, cpus: int | None = None) -> None:
        if not host.up:
            host.boot()
        command = [
            str(Path(sys.executable).with_name("ray")), "start", *options, f"--node-ip-address={host.ip}",
            f"--num-cpus={self._cpus if cpus is None else cpus}", "--object-store-memory=100000000", "--disable-usage-stats",
        ]  # fmt: skip
        done = host.run(command, env=self._env, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr


def _watch(address: str) -> None:
    """For each line on stdin, the nodes as one line of JSON."""
    from ray._raylet import GcsClient

    client = GcsClient(address=address)
    for _ in sys.stdin:
        nodes = client.get_all_node_info(timeout=30).values()
        print(json.dumps({n.node_id.hex(): (n.node_manager_address, n.state == 0) for n in nodes}), flush=True)


if __name__ == "__main__":
    _watch(sys.argv[1])
