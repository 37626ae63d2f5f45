"""The rank's agent, which Ray Train runs in each worker: the only module that connects Ray and the training loop.

Runs in: each Ray Train worker. Of the code that runs in a worker, only this module imports ray. Never imports torch: the rank is a
child process, which may crash, hang or be killed. The agent then reports how it exited, and starts the next one.

    coordinator --order: attempt 2, rendezvous at HOST:PORT--> agent --fork--> rank
              <---- how the rank of attempt 1 exited -----          <--calls-- push, durable, ended
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray.exceptions import RayError

from raydist import registry
from raydist.errors import StorageError
from raydist.ipc import heartbeat as heartbeat_ipc
from raydist.ipc import mailbox
from raydist.ipc.stack_dump import Witness, waits, where
from raydist.launch.control_connection import ControlClient
from raydist.launch.fork_server import ForkServer, Process, share_zygote
from raydist.launch.oom_detector import MemoryWatch
from raydist.launch.rank_main import facts
from raydist.launch.rank_output import Output
from raydist.launch.relay import Link
from raydist.launch.rendezvous import hold_port, port_of
from raydist.launch.zygote import VARIABLE, Zygote
from raydist.redact import redact
from raydist.run.directory import LOGS, RunDir
from raydist.worker.metrics.startup_timing import waited

_PUSH_TIMEOUT_S = 10.0
_WATCH_S = 0.5
_REPORT_AGAIN_S = 10.0
_COLLECTIVES, _OF_ALL, _AT_LEAST = 1000, 500_000, 20
"""The newest collectives of a rank that the coordinator gets when a rank hangs: with many ranks fewer, so that those of all ranks
take about 100 MiB there."""
_BEAT_S = 1.0
"""Until the first beat, whose answer says when the next one is due."""
_OUTPUT_S = 5.0
"""How long a closing agent waits until the rank's last output is on storage."""
_DISCONNECTED_S = 15.0
"""How long an agent without connection to the coordinator lets its rank train: longer than the others need to go on."""


def agent(config: dict[str, Any]) -> None:
    """Follows the coordinator's orders until "leave". `config`: `coordinator`, an actor's handle, `group`, a number, `env`, the
    environment variables that all agents of the group have, and `folder`, the driver's working directory.
    """
    agent = _Agent(config)
    threading.Thread(target=agent.beat, name="raydist-beat", daemon=True).start()
    try:
        agent.run()
    finally:
        agent.close()


class _Agent:
    def __init__(self, config: dict[str, Any]) -> None:
        self._coordinator, self._group = config["coordinator"], config["group"]
        self._number, self._local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        self._left, self._told = threading.Event(), 0.0
        registry.own_code_last(config["folder"])  # on a cluster Ray has put it first; ranks get this process's path
        self.node_ip = ray.util.get_node_ip_address()
        self._node = ray.get_runtime_context().get_node_id()
        alone = int(os.environ["LOCAL_WORLD_SIZE"]) < 2
        key = f"{ray.get_runtime_context().get_job_id()} {self._group} {self._node}"
        self._zygote = None if alone else self._shared_zygote(key, config["env"])
        self._link = Link(self._direct, ControlClient(self._coordinator.many.remote).many, None if alone else key)
        self.server = ForkServer()
        self._port = hold_port(self.node_ip)
        self._attempt: _Attempt | None = None

    def _shared_zygote(self, key: str, env: dict[str, str]) -> Zygote | None:
        """On a cluster, the zygote of the group's agents on this node, if this agent starts it. A private Ray has one already."""
        return None if VARIABLE in os.environ else share_zygote(key, env)

    def run(self) -> None:
        seen = 0
        while True:
            order = self.tell("next", self._number, seen, self._offer())
            seen = order["number"]
            match order["do"]:
                case "leave":
                    return
                case "train":
                    self._link.connect()
                    self._attempt = _Attempt(self, order)
                case "look" if self._attempt is not None:
                    threading.Thread(target=self._attempt.look, name="raydist-look", daemon=True).start()
                case "kill" if self._attempt is not None:
                    self._attempt.kill()

    def close(self) -> None:
        self._left.set()
        self.server.close()
        if self._zygote is not None:
            self._zygote.close()
        self._port.close()
        if self._attempt is not None:
            self._attempt.wait_for_output(_OUTPUT_S)

    def beat(self) -> None:
        """Sends heartbeats to the coordinator, as often as its answers say: all agents of a node, which have the same clock, at the
        same times. Where they are far apart, one soon after another message is left out. If the agent is disconnected or replaced,
        it exits with its rank.
        """
        beat_s, last_message = _BEAT_S, time.monotonic()
        while not self._left.wait(beat_s - time.monotonic() % beat_s):
            if time.monotonic() - self._told < (beat_s - _BEAT_S) / 2:
                continue
            with contextlib.suppress(RayError, TimeoutError):
                beat_s = self.tell("beat", self._number, timeout_s=_DISCONNECTED_S)
                last_message = time.monotonic()
            if not beat_s or time.monotonic() - last_message > _DISCONNECTED_S + 3 * beat_s:
                self.server.close()
                os._exit(1)

    def tell(self, method: str, *what: Any, timeout_s: float | None = None) -> Any:
        """Calls a method of the coordinator for this agent's group. Raises RayError, and TimeoutError."""
        if method in ("next", "ended"):
            self._told = time.monotonic()
        return self._link.call(method, self._group, *what, timeout_s=timeout_s)

    def monitor(self, attempt: int) -> Any:
        """The handle of the run's monitor. Raises TimeoutError if another attempt has begun, and RayError."""
        handle = ray.get(self._coordinator.monitor.remote(self._group, attempt), timeout=_PUSH_TIMEOUT_S)
        if handle is None:
            raise TimeoutError(f"attempt {attempt} is over")
        return handle

    def _direct(self, method: str, *given: Any, timeout_s: float | None) -> Any:
        return ray.get(getattr(self._coordinator, method).remote(*given), timeout=timeout_s)

    def take_port(self) -> socket.socket:
        """The port that was offered last; holds a new one for the next offer."""
        port, self._port = self._port, hold_port(self.node_ip)
        return port

    def _offer(self) -> dict[str, Any]:
        """Where this agent runs, and where the next attempt's ranks can meet if its rank is 0."""
        return {
            "node": self._node,
            "placement_group": ray.util.get_current_placement_group().id.hex(),
            "local_rank": self._local_rank,
            "host": self.node_ip,
            "port": port_of(self._port),
        }


class _Attempt:
    """One attempt on this rank, from its start until the coordinator has its result; in its own threads."""

    def __init__(self, agent: _Agent, order: dict[str, Any]) -> None:
        self._agent, self._env, self._number = agent, order["env"], int(order["attempt"])
        self._job, self._rank = json.loads(order["job"]), int(self._env["RANK"])
        self._begun = time.monotonic() - waited(self._job["begun"], order["waited_s"])
        self._port = agent.take_port()
        self._started = threading.Event()
        self._process: Process | None = None
        self._killed = False
        self._result: dict[str, Any] = {}
        self._output: Output | None = None
        self._thread = threading.Thread(target=self._run, name="raydist-attempt", daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self._started.wait()
        if self._process is not None and not self._process.ended.is_set():
            self._killed = True
            self._agent.server.kill(self._process)

    def wait_for_output(self, timeout_s: float) -> None:
        """Returns once everything that the rank printed is on storage, or after `timeout_s`."""
        if self._output is not None:
            self._output.wait(timeout_s)

    def _run(self) -> None:
        agent = self._agent
        try:
            with self._port, contextlib.ExitStack() as stack:
                try:
                    process = self._process = self._start(stack)
                finally:
                    self._started.set()
                report_at, memory = 0.0, MemoryWatch(process.pid)
                while not process.ended.wait(_WATCH_S):
                    memory.look()
                    if self._reader.look().late and time.monotonic() > report_at:
                        agent.tell("late", self._number)
                        report_at = time.monotonic() + _REPORT_AGAIN_S
            seen, silent = time.time(), self._reader.look().seconds
            if not self._result:
                ordered = self._killed and process.how == "SIGKILL"
                starved = memory.why() if process.how == "SIGKILL" and not ordered else ""
                self._result["died"] = {
                    "pid": process.pid,
                    "node_ip": agent.node_ip,
                    "how": process.how,
                    "starved": starved,
                    "ordered": ordered,
                }
        except Exception as error:
            seen, silent = time.time(), 0.0
            self._result["error"] = facts(error, self._rank)
        agent.tell("ended", self._rank, self._number, {**self._result, "at": seen, "silent_s": silent})

    def _start(self, stack: contextlib.ExitStack) -> Process:
        calls, their_calls = socket.socketpair()
        control, their_control = socket.socketpair()
        stack.enter_context(control)
        heartbeat, stacks = heartbeat_ipc.create(), os.memfd_create("raydist-stacks")
        self._reader = heartbeat_ipc.Reader(heartbeat)
        output = Output(self._job["run"], self._number, self._rank)
        with their_calls, their_control:
            fds = [their_calls.fileno(), their_control.fileno(), stacks, heartbeat, output.fd]
            try:
                self._agent.server = self._agent.server.living()
                box = mailbox.file_of(redact(self._job["run"]), self._agent.node_ip, self._rank)
                process = self._agent.server.fork(fds, self._env, box)
            except BaseException:
                output.abandon()
                raise
        output.begin()
        self._output = output
        os.close(heartbeat)
        stack.callback(os.close, stacks)
        self._witness = Witness(process.pid, stacks, control)
        connection = Connection(calls.detach())
        order = {**self._job, "begun": self._begun, "rank": self._rank, "node_ip": self._agent.node_ip}
        connection.send_bytes(json.dumps(order).encode())
        threading.Thread(target=self._serve, args=(connection,), name="raydist-calls", daemon=True).start()
        return process

    def look(self) -> None:
        """Reports to the coordinator what this rank is doing, and writes its stacks and collectives to the run's logs."""
        agent, look, witness = self._agent, self._reader.look(), self._witness
        newest = max(_AT_LEAST, min(_COLLECTIVES, _OF_ALL // int(self._env["WORLD_SIZE"])))
        state, stacks, collectives = witness.state(), "", None
        if state not in "TtZ":
            stacks, collectives = witness.stacks(), witness.collectives()
        sight = {
            "state": state,
            "step": look.step,
            "phase": look.phase,
            "seconds": look.seconds,
            "where": where(stacks, look.thread),
            "waits": waits(stacks, look.thread),
            "answers": collectives is not None,
            "collectives": (collectives or [])[-newest:],
        }
        with contextlib.suppress(StorageError):  # storage may be the cause of the hang
            store_look(self._job["run"], self._job["attempt"], self._rank, stacks, collectives)
        agent.tell("seen", self._rank, self._number, sight)

    def _serve(self, connection: Connection) -> None:
        """Answers the rank's calls until it exits."""
        monitor: Any = None
        with connection:
            while True:
                try:
                    call = json.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    return
                what = call.pop("what")
                answer: dict[str, Any] = {"value": None}
                try:
                    if what not in ("ended", "clock") and monitor is None:
                        # Of this run: the next attempt may belong to another.
                        monitor = self._agent.monitor(self._number)
                    if what == "ended":
                        self._result.update(call)
                    elif what == "push":
                        answer["value"] = ray.get(
                            monitor.push.remote(**call, node=self._agent.node_ip), timeout=_PUSH_TIMEOUT_S
                        )
                    elif what == "stage":
                        monitor.stage.remote(self._job["attempt"], **call)  # no wait: for display only
                    elif what == "durable":
                        ray.get(monitor.flush.remote(), timeout=_PUSH_TIMEOUT_S)
                    elif what == "clock":  # an injected fault
                        from raydist.faults.clock import jump

                        jump(**call)
                except (RayError, TimeoutError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                try:
                    connection.send_bytes(json.dumps(answer).encode())
                except OSError:
                    return


def store_look(run: str, attempt: int, rank: int, stacks: str, collectives: list[list[Any]] | None) -> None:
    """Writes the stacks and collectives of a rank to the run's logs. Raises StorageError."""
    storage = RunDir(run).expect().storage
    name = f"{LOGS}/attempt-{attempt:04d}/rank-{rank:05d}"
    storage.write(f"{name}.stacks.txt", stacks.encode())
    storage.write(f"{name}.collectives.json", json.dumps(collectives).encode())
