"""What the processes of a run listen on, and what docs/explanation/security.md says of it.

As a command, on a host: prints `opened` of all its processes as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from tests.processes import command_line

DOCS = Path(__file__).parents[1] / "docs/explanation/security.md"
KINDS = {
    "gcs_server": re.compile(r"/gcs_server\b"),
    "raylet": re.compile(r"/raylet/raylet\b"),
    "zygote": re.compile(r"raydist\.launch\.zygote|tests\.host_zygotes"),
    "driver": re.compile(r"tests\.end_to_end\.driver|bin/raydist train|raydist\.api\.driver"),
    "ray::": re.compile(r"^ray::|default_worker\.py|ray_agent\.py"),
}

# As another user (`user`): tries everything that it finds, and prints what it got.
ATTACK = """
import json, os, signal, socket, sys
what = json.loads(sys.argv[1])
user = what.get("user", 65534)
os.setgroups([]); os.setgid(user); os.setuid(user)
got = []
def attempt(name, call):
    try:
        call()
    except OSError:
        return
    got.append(name)
def ask(sock):
    sock.sendall(b'[0, "beat", [1, 0]]\\n')
def order(sock):  # a fork server of the zygote's user, and then a rank of it
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, open(os.devnull, "w") as null:
        told = {"env": {}, "cwd": "/", "path": sys.path}
        socket.send_fds(sock, [json.dumps(told).encode()], [theirs.fileno(), null.fileno(), null.fileno()])
        theirs.close()
        ours.settimeout(60)  # a refusal closes it
        ours.sendall(b'{"env": {}}')
        if b"forked" in ours.recv(100):
            got.append(f"run a process by {address}")
for path in what["paths"]:
    attempt(f"list {path}", lambda: os.listdir(path) and None if os.path.isdir(path) else open(path, "rb").read())
    attempt(f"rename {path}", lambda: os.rename(path, path + "-mine"))
    attempt(f"delete {path}", lambda: os.unlink(path))
    attempt(f"write {path}", lambda: open(path + "/mine" if os.path.isdir(path) else path, "w"))
for address in what["unix"]:
    if address.startswith("@"):  # everybody may connect to an abstract name: it must not answer
        for kind, say in ((socket.SOCK_STREAM, ask), (socket.SOCK_SEQPACKET, order)):
            sock = socket.socket(socket.AF_UNIX, kind)
            sock.settimeout(5)
            try:
                sock.connect("\\0" + address[1:])
                say(sock)
                heard = sock.recv(100)
            except OSError:
                continue
            if heard:
                got.append(f"hear {address}")
        continue
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET if "zygote" in address else socket.SOCK_STREAM)
    attempt(f"connect {address}", lambda: sock.connect(address))
for pid in what["pids"]:
    for number in (signal.SIGSTOP, signal.SIGKILL):
        attempt(f"signal {pid}", lambda: os.kill(pid, number))
    for name in ("environ", "mem", "fd"):
        path = f"/proc/{pid}/{name}"
        attempt(f"{name} {pid}", lambda: os.listdir(path) if name == "fd" else open(path, "rb").read(1))
for host, port in what["tcp"]:
    sock = socket.socket()
    sock.settimeout(5)
    try:
        sock.connect((host, port))
        sock.sendall(b"\\x00" * 64 + b"GET / HTTP/1.0\\r\\n\\r\\n")
    except OSError:
        pass
print(json.dumps(got))
"""

# As another user: prints on which of these it can listen, with each of the options that let sockets share a port.
TAKE = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
for host in (sys.argv[1], ""):
    for options in ([], [socket.SO_REUSEADDR], [socket.SO_REUSEPORT], [socket.SO_REUSEADDR, socket.SO_REUSEPORT]):
        with socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET) as sock:
            for option in options:
                sock.setsockopt(socket.SOL_SOCKET, option, 1)
            try:
                sock.bind((host, int(sys.argv[2])))
                sock.listen()
                print(repr(host), options)
            except OSError:
                pass
"""


def taken(host: str, port: int) -> str:
    """How another user can listen on that port of the address or of all addresses: a line for each way."""
    command = [sys.executable, "-c", TAKE, host, str(port)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def kind(process: psutil.Process) -> str:
    """The process as the table names it. A rank is forked by a fork server, which the zygote has forked."""
    line = " ".join(process.cmdline()) or process.name()
    found = next((name for name, pattern in KINDS.items() if pattern.search(line)), "")
    above = 0
    while (
        found == "zygote" and (parent := process.parent()) is not None and KINDS["zygote"].search(command_line(parent))
    ):
        process, above = parent, above + 1
    return "rank" if above >= 2 else found


def opened(processes: Iterable[psutil.Process]) -> tuple[set[tuple[str, str]], dict[str, Any]]:
    """(process, path or kind of address) of all that listens; and the addresses and process ids, for the attack."""
    rows: set[tuple[str, str]] = set()
    what: dict[str, Any] = {"unix": set(), "tcp": set(), "pids": set()}
    for process in processes:
        try:
            name, connections = kind(process), process.net_connections("all")
        except psutil.NoSuchProcess:
            continue
        what["pids"].add(process.pid)
        for c in connections:
            if isinstance(c.laddr, str):
                if c.laddr:
                    rows.add((name, c.laddr))
                    what["unix"].add(c.laddr)
            elif c.status == psutil.CONN_LISTEN:
                where = {"::": "all", "0.0.0.0": "all", "127.0.0.1": "loopback", "::1": "loopback"}.get(
                    c.laddr.ip, "node"
                )
                rows.add((name, where))
                what["tcp"].add(("127.0.0.1" if where == "all" else c.laddr.ip, c.laddr.port))
    return rows, what


def documented() -> dict[str, set[str]]:
    """Process -> the kinds of addresses that the table allows it."""
    found: dict[str, set[str]] = {}
    names = (*KINDS, "rank")
    section = DOCS.read_text().split("## What a run opens")[1].split("| file or folder")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0] not in ("what", "---"):
            for name in (name for name in names if name in cells[1].split(", ")):
                found.setdefault(name, set()).update(
                    re.findall(r"\b(?:all|loopback|node)\b|[/@](?:tmp|dev|raydist)[^,;]*", cells[2])
                )
    return found


def unexpected(rows: Iterable[tuple[str, str]]) -> list[str]:
    """What listens although the page does not say so."""
    allowed = documented()
    patterns = {name: [re.escape(text).replace(r"\*", "[^/]*") for text in texts] for name, texts in allowed.items()}
    return [
        f"{name!r} listens on {address}: not in {DOCS.name}"
        for name, address in sorted(rows)
        if not any(re.fullmatch(one, address) for one in patterns.get(name, ()))
    ]


if __name__ == "__main__":
    rows, what = opened(psutil.process_iter())
    print(json.dumps([sorted(rows), {name: sorted(found) for name, found in what.items()}]))
