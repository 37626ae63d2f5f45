"""A live run against docs/explanation/security.md, and against a second user of the same host.

Over a minute: it starts a Ray of its own, and one run on it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from raydist.ipc import mailbox
from tests import needs
from tests.end_to_end.test_memory import until_copied
from tests.processes import command_line

NOBODY = 65534
DOCS = Path(__file__).parents[2] / "docs/explanation/security.md"
KINDS = {
    "gcs_server": re.compile(r"/gcs_server\b"),
    "raylet": re.compile(r"/raylet/raylet\b"),
    "zygote": re.compile(r"raydist\.launch\.zygote"),
    "driver": re.compile(r"tests\.end_to_end\.driver"),
    "ray::": re.compile(r"^ray::|default_worker\.py|ray_agent\.py"),
}

# As another user: tries everything that it finds, and prints what it got.
ATTACK = """
import json, os, signal, socket, sys
what = json.load(sys.stdin)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
got = []
def attempt(name, call):
    try:
        call()
    except OSError:
        return
    got.append(name)
for path in what["paths"]:
    attempt(f"list {path}", lambda: os.listdir(path) and None if os.path.isdir(path) else open(path, "rb").read())
    attempt(f"rename {path}", lambda: os.rename(path, path + "-mine"))
    attempt(f"delete {path}", lambda: os.unlink(path))
    attempt(f"write {path}", lambda: open(path + "/mine" if os.path.isdir(path) else path, "w"))
for address in what["unix"]:
    if address.startswith("@"):  # everybody may connect to an abstract name: it must not answer
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(5)
        try:
            sock.connect("\\0" + address[1:])
            sock.sendall(b'[0, "beat", [1, 0]]\\n')
            heard = sock.recv(100)
        except OSError:
            heard = b""
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


def opened(root: psutil.Process) -> tuple[set[tuple[str, str]], dict[str, Any]]:
    """(process, path or kind of address) of all that listens; and the addresses and process ids, for the attack."""
    rows: set[tuple[str, str]] = set()
    what: dict[str, Any] = {"unix": set(), "tcp": set(), "pids": set()}
    for process in [root, *root.children(recursive=True)]:
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
    section = DOCS.read_text().split("## What a run opens")[1].split("| file or folder")[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[0] not in ("what", "---"):
            processes = ["driver", "ray::"] if "python" in cells[1] else [cells[1]]
            for name in processes:
                found.setdefault(name, set()).update(
                    re.findall(r"\b(?:all|loopback|node)\b|[/@](?:tmp|dev|raydist)[^,;]*", cells[2])
                )
    return found


def test_a_live_run_and_another_user_of_the_host(project: Any) -> None:
    """What it opens is what the page says; the other user reads, changes, connects to and signals nothing, and the run goes on."""
    needs.require("second user")
    process = project.warm_start(
        "train",
        "job.yaml",
        "--name",
        "held",
        "--set",
        "recovery.snapshot_every=2",
        *project.options("held", [], hold=11),
    )
    copies = until_copied(process)
    rows, what = opened(psutil.Process(process.pid))
    allowed = documented()
    for name, address in sorted(rows):
        pattern = [re.escape(text).replace(r"\*", "[^/]*") for text in allowed.get(name, ())]
        assert any(re.fullmatch(one, address) for one in pattern), f"{name!r} listens on {address}: not in {DOCS.name}"
    assert ("rank", "node") in rows
    assert ("driver", f"{copies}/bell") in rows
    assert any(name == "ray::" and address.startswith("@raydist-") for name, address in rows)
    session = Path(next(path for path in what["unix"] if path.endswith("/zygote"))).parent
    run = project.runs / "held"
    board = mailbox.folder(str(run))
    journals = [
        p for p in Path("/dev/shm").glob("raydist-*-journal-*") if f'"pid": {process.pid},' in p.read_text()[:500]
    ]
    modes = {path: path.stat().st_mode & 0o777 for path in (session, copies, board, run, *journals)}
    assert journals
    assert set(modes.values()) <= {0o700, 0o600}, modes
    paths = [*modes, session / "r", session / "zygote", copies / "lock", run / "spec.yaml", run / "state.json"]
    asked = {**{name: sorted(found) for name, found in what.items()}, "paths": [str(path) for path in paths]}
    attack = subprocess.run(
        [sys.executable, "-c", ATTACK],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert attack.returncode == 0, attack.stderr
    assert json.loads(attack.stdout) == []
    assert all(path.exists() for path in paths)
    (project.root / "marks" / "held" / "go").touch()
    _, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    assert project.show("held")["steps"] == 12
    assert len(project.show("held")["attempts"]) == 1, "it was not even restarted"
    ray_logs = run / "logs" / "ray"
    readable = [p for p in run.rglob("*") if ray_logs not in p.parents and p.stat().st_mode & 0o077]
    assert readable == []
