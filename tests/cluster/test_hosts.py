"""Several hosts on one machine: what each one sees, the effects of a cut and of a death, and that nothing is left over."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import needs
from tests.hosts import Host, Hosts, Process

MBIT = 100

SERVER = """
import socket, time
with socket.create_server(("", 7000)) as server:
    print("listening", flush=True)
    connection, (peer, _) = server.accept()
print("connected", flush=True)
got, begin = 0, time.monotonic()
while data := connection.recv(1 << 16):
    got += len(data)
    if data.endswith(b"?"):
        print(data.decode(), flush=True)
        connection.sendall(data)
print(peer, got, time.monotonic() - begin, flush=True)
"""

CLIENT = """
import select, socket, sys
connection = socket.create_connection((sys.argv[1], 7000))
for line in sys.stdin:
    match line.split():
        case "send", size:
            connection.sendall(bytes(int(size)))
            connection.shutdown(socket.SHUT_WR)
        case "ask", question:
            connection.sendall(question.encode() + b"?")
        case "hear",:
            try:
                print(connection.recv(100).decode() or "closed", flush=True)
            except ConnectionResetError:
                print("reset", flush=True)
        case "vain",:  # what was asked has been sent again, twice, and nothing has come
            silent = True
            while silent and connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[2] < 2:
                silent = not select.select([connection], [], [], 0.01)[0]
            print("silence" if silent else "sound", flush=True)
"""


class Talk:
    """A TCP connection from one host to another, which it resolves by name; the client obeys lines."""

    def __init__(self, client: Host, server: Host) -> None:
        self.server = server.popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE)
        assert said(self.server) == "listening"
        pipe = subprocess.PIPE
        self.client = client.popen([sys.executable, "-c", CLIENT, server.name], stdin=pipe, stdout=pipe)
        assert said(self.server) == "connected"  # and its port is free for the next one

    def do(self, *lines: str) -> None:
        assert self.client.stdin is not None
        self.client.stdin.writelines(f"{line}\n" for line in lines)
        self.client.stdin.flush()

    def ask(self, question: str) -> str:
        """The reply: "QUESTION?" from a running server, or "closed" or "reset"."""
        self.do(f"ask {question}", "hear")
        return said(self.client)

    def ask_in_vain(self, question: str) -> bool:
        """Whether the kernel retransmits the question and no reply arrives."""
        self.do(f"ask {question}", "vain")
        return said(self.client) == "silence"

    def heard(self) -> bool:
        """Whether the server has received a question that was not read before."""
        return bool(select.select([self.server.stdout], [], [], 0)[0])

    def hear(self) -> str:
        self.do("hear")
        return said(self.client)


def said(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().removesuffix("\n")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3, rate=f"{MBIT}mbit") as made:
        yield made


def test_hosts_have_names_and_places_of_their_own(hosts: Hosts) -> None:
    """Each host has its own name, which does not resolve to 127.0.0.1, and its own temporary files and shared memory."""
    look = "import os, socket, tempfile; n = socket.gethostname(); print(n, socket.gethostbyname(n), tempfile.mkstemp()[1])"
    for host in hosts:
        name, ip, file = host.run([sys.executable, "-c", look]).stdout.split()
        assert (name, ip) == (host.name, host.ip)
        assert not Path(file).exists()
        host.run(["touch", f"/dev/shm/{host.name}"])
        left = host.run(["sh", "-c", 'ls /dev/shm "$TMPDIR" /sys/class/net']).stdout.split()
        assert left == ["/dev/shm:", host.name, "/run/tmp:", Path(file).name, "/sys/class/net:", "eth0", "lo"]
    assert not Path("/dev/shm", hosts[0].name).exists()


def test_a_link_has_its_rate(hosts: Hosts) -> None:
    """One second's worth of bytes takes a second, +-40%."""
    size = MBIT * 1_000_000 // 8
    talk = Talk(hosts[0], hosts[1])
    talk.do(f"send {size}")
    peer, got, seconds = said(talk.server).split()
    assert (peer, int(got)) == (hosts[0].ip, size)
    assert 0.6 < float(seconds) < 1.4


@pytest.mark.parametrize("of_all", [False, True], ids=["one", "all"])
def test_a_cut_is_silent_and_heals(hosts: Hosts, of_all: bool) -> None:
    """No packet passes in either direction and no connection ends. After the heal each continues; other connections are not
    affected."""
    ways = Talk(hosts[0], hosts[1]), Talk(hosts[1], hosts[0])
    others = [Talk(hosts[0], hosts[2]), Talk(hosts[2], hosts[1])]
    cut = (hosts[1], None) if of_all else (hosts[0], hosts[1])
    assert [way.ask("before") for way in (*ways, *others)] == ["before?"] * 4
    assert [said(way.server) for way in ways] == ["before?"] * 2
    hosts.cut(*cut)
    assert all(way.ask_in_vain("during") for way in ways)
    assert not any(way.heard() for way in ways)
    assert others[0].ask("others") == "others?"
    if of_all:
        assert others[1].ask_in_vain("others")
        hosts.heal(*cut)
        assert others[1].hear() == "others?"
    else:
        assert others[1].ask("others") == "others?"
        hosts.heal(*cut)
    assert [way.hear() for way in ways] == ["during?"] * 2
    assert [way.ask("after") for way in ways] == ["after?"] * 2


def test_a_killed_host_says_goodbye_and_one_without_power_does_not(hosts: Hosts) -> None:
    """All its processes end at once, also a daemon; its peers see closed connections, or only silence. It then boots as a new
    host."""
    talks = {host.name: Talk(hosts[0], host) for host in hosts if host is not hosts[0]}
    assert [talk.ask("before") for talk in talks.values()] == ["before?"] * 2
    before = hosts[1].processes()
    hosts[1].run(["setsid", "--fork", "sleep", "1000"])
    (daemon,) = (process for number, process in hosts[1].processes().items() if number not in before)
    hosts[1].kill()
    assert not daemon.is_running()
    assert talks["host1"].server.returncode == -signal.SIGKILL
    assert talks["host1"].hear() in ("closed", "reset")
    hosts[2].power_off()
    assert talks["host2"].ask_in_vain("during")
    for host in (hosts[1], hosts[2]):
        host.boot()
        assert list(host.processes()) == [1]
        assert Talk(hosts[0], host).ask("again") == "again?"


def test_signals_reach_the_process_in_the_host(hosts: Hosts) -> None:
    """`send_signal` and a timeout act on the command, not on the process that waits for it; its exit status is visible
    outside."""
    trap = "trap 'echo told; exit 7' TERM; echo $$; while :; do sleep 0.01; done"
    process = hosts[0].popen(["sh", "-c", trap], stdout=subprocess.PIPE)
    number = int(said(process))
    assert hosts[0].processes()[number] == process.inner
    process.send_signal(signal.SIGTERM)
    assert (said(process), process.wait(240)) == ("told", 7)
    process = hosts[0].popen(["sleep", "1000"])
    process.kill()
    assert process.wait(240) == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        hosts[0].run(["sleep", "1000"], timeout=0.2)
    assert list(hosts[0].processes()) == [1]


OWNER = """
import json, os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are started with it ignored
from tests.hosts import Hosts
with Hosts(2) as hosts:
    for host in hosts:
        host.run(["setsid", "--fork", "sleep", "1000"])
    waiting = hosts[0].popen(["sleep", "1000"])
    boxes = [hosts.switch.init, *(p.pid for host in hosts for p in host.processes().values())]
    print(json.dumps([*boxes, waiting.pid]), flush=True)
    match sys.stdin.readline():
        case "raise\\n":
            raise ValueError
        case "cut\\n":
            hosts.cut(hosts[0])
            hosts[1].power_off()
            raise ValueError
        case _:
            while True:
                time.sleep(0.05)  # not pause(): a signal that comes just before it would be waited for for ever
"""


@pytest.mark.parametrize("end", ["raise", "cut", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_is_left(end: str) -> None:
    """However the process that made the hosts ends: no process, namespace, mount or link of it remains."""
    needs.require(*needs.HOSTS)
    before = surroundings()
    command = [sys.executable, "-c", OWNER]
    pipe = subprocess.PIPE
    root = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env, cwd=root) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        pids = json.loads(owner.stdout.readline())
        processes = [psutil.Process(pid) for pid in pids]
        spaces = {space for p in processes for space in namespaces(p.pid)} - namespaces(os.getpid())
        assert len(spaces) == 3 * 5
        assert surroundings() == before
        owner.stdin.write(f"{end}\n")
        owner.stdin.flush()
        if end.startswith("SIG"):
            owner.send_signal(getattr(signal, end))
        try:
            owner.communicate(timeout=240)
        finally:
            owner.kill()
        assert owner.returncode != 0
    _, alive = psutil.wait_procs(processes, timeout=240)
    assert not alive
    assert surroundings() == before
    left = {space for pid in psutil.pids() for space in namespaces(pid)}
    assert not spaces & left


def namespaces(pid: int) -> set[str]:
    try:
        return {os.readlink(f"/proc/{pid}/ns/{kind}") for kind in ("net", "uts", "ipc", "mnt", "pid")}
    except OSError:  # it has ended in the meantime
        return set()


def surroundings() -> dict[str, object]:
    """Mounts, links and names of the machine itself."""
    links = json.loads(subprocess.run(["ip", "-json", "link"], capture_output=True, check=True).stdout)
    return {
        "mounts": Path("/proc/self/mounts").read_text(),
        "links": [(link["ifname"], link["operstate"]) for link in links],
        "name": os.uname().nodename,
        "hosts": Path("/etc/hosts").read_text(),
    }
