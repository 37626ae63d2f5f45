"""A run, as its folder has it: its steps, events, findings and checkpoints, during and after training.

Runs in: the user's process. Imports pyarrow inside functions; torch in `Run.model`, `sample`, `chat` and `weights` alone; never
ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from raydist.api import notebook
from raydist.api.call import Call, check_numbers
from raydist.errors import StopFailed, TrainingStopped, UsageError
from raydist.printable import printable
from raydist.run.directory import REPORT, Folder, RunDir
from raydist.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa
    from torch import Tensor, nn

    from raydist.launch.replay import Replay
    from raydist.records import Event
    from raydist.report.run_metrics import Report
    from raydist.run.sweep_directory import SweepDir
    from raydist.worker.sampling import Chat

POLL_S = 0.5
STOP_S = 600.0


Of = TypeVar("Of", bound=Folder)


class Started(Generic[Of]):
    """What a run and a sweep have in common. `driver`: its driver, if this process has started it."""

    _kind = "run"

    def __init__(self, folder: Of, driver: Call | None = None) -> None:
        self.folder = folder
        self._driver = driver

    @property
    def name(self) -> str:
        """Its name."""
        return self.folder.name

    @property
    def uri(self) -> str:
        """Its folder: a path, or a URI."""
        return self.folder.uri

    def ended(self) -> bool:
        """Whether no driver trains it now."""
        if self._driver is not None:
            return self._driver.ended()
        from raydist.run.lease import newest_driver

        driver = newest_driver(self.folder)
        return driver is None or not driver.alive

    def _until_ended(self, timeout: float | None, refresh: Callable[[], None] = lambda: None) -> None:
        """Raises TimeoutError after `timeout` seconds. `refresh` is called often meanwhile."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.ended():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self._kind} {self.name} has not ended in {timeout:g} s")
            self._pause(deadline)
            refresh()

    def _pause(self, deadline: float | None) -> None:
        pause = POLL_S if deadline is None else max(0.0, min(POLL_S, deadline - time.monotonic()))
        if self._driver is None:
            time.sleep(pause)
            return
        try:
            self._driver.wait(pause)
        except TimeoutError:
            return

    def _stop(self, wait: bool, timeout: float) -> None:
        """Returns, with `wait`, when its driver's process has ended, too. Raises StopFailed."""
        from raydist.api import stopping

        folder = stopping.Driven(cast("RunDir | SweepDir", self.folder))
        stopping.stop(folder, timeout if wait else None, f"raydist.{type(self).__name__}.stop")
        if wait and self._driver is not None:
            try:
                self._driver.wait(timeout)
            except TimeoutError:
                raise StopFailed(
                    f"{self._kind} {self.name}: its driver, process {self._driver.pid}, has not ended"
                ) from None


class Run(Started[RunDir]):
    """`raydist.open` and `raydist.train` return it. Every call reads the run's folder anew; none needs the cluster.

    Reading raises StorageError if storage refuses, or a file is damaged.
    """

    @property
    def status(self) -> str:
        """running, finished, paused, stopped, interrupted or lost: see raydist.records.Status."""
        return str(self.show()["status"])

    def show(self) -> dict[str, Any]:
        """What `raydist show --json` prints: status, steps, losses, attempts, checkpoints, workers."""
        from raydist.report import summary

        return dict(printable(summary.show(self.folder)))

    def watch(self) -> dict[str, Any]:
        """What `raydist watch --json` prints: the step, memory and shares of time of each rank, over the last 30 seconds."""
        from raydist.report.watch import view

        return view(self.folder)

    def steps(self, columns: Sequence[str] | None = None) -> pa.Table:
        """One row per step, ascending, with the fields of raydist.records.StepRecord; of a step trained twice, the last.
        `columns`: only `step` and these. Raises UsageError for an unknown one."""
        from raydist.registry import did_you_mean
        from raydist.run.log import FIELDS, read_steps

        names = tuple(FIELDS) if columns is None else columns
        for name in names:
            if name not in FIELDS:
                raise UsageError(f"steps have no column {name!r}", did_you_mean(name, list(FIELDS)))
        return read_steps(self.folder, names)

    def events(self, kind: str | None = None) -> list[Event]:
        """The run's events in order: attempts, failures, decisions, evaluations, findings and others. `kind`: only these."""
        from raydist.run.log import read_events

        return [event for event in read_events(self.folder) if kind in (None, event.kind)]

    def findings(self) -> list[dict[str, Any]]:
        """What the rules of raydist.diagnosis found, in order: raydist.records.Finding, and `at` (Unix time).
        One whose `state` is "over" is the end of an earlier one."""
        return [{**event.data, "at": event.at} for event in self.events("finding")]

    @property
    def checkpoints(self) -> list[dict[str, Any]]:
        """The committed checkpoints, oldest first: step, bytes, best, eval_loss, world_size, attempt, saved_at, problem."""
        from raydist.checkpoint import manifest

        return manifest.summary(self.folder)

    def save(self, timeout: float = STOP_S) -> int:
        """Has a run that trains save a checkpoint after its present step. Returns that step, once the checkpoint is committed.

        Raises UsageError if it does not train, SaveFailed if nothing is committed in `timeout` seconds.
        """
        from raydist.checkpoint.on_request import save_now

        return save_now(self.folder, timeout, "raydist.Run.save")

    def verify(self, step: int | None = None) -> list[dict[str, Any]]:
        """Reads every byte of its checkpoints, or of that of `step`: of each its step, whether it is good, and its problems."""
        from raydist.checkpoint import retention

        return list(retention.verified(self.folder, step))

    def prune(self, keep: int | None = None, damaged: Callable[[str], object] = lambda problem: None) -> list[int]:
        """Deletes its checkpoints but the `keep` newest, by default as many as its spec says, the best, and those being read.

        What is kept is read before: a damaged checkpoint stays, but does not count, and `damaged` gets its problems. Returns the
        steps of the deleted ones.
        """
        from raydist.checkpoint import retention
        from raydist.spec import read_stored

        if keep is not None and keep < 1:
            raise UsageError(f"keep={keep}: the newest checkpoint is never deleted", "keep at least 1")
        kept = read_stored(self.folder.storage).checkpoint.keep if keep is None else keep
        return retention.prune(self.folder, kept, damaged=damaged)

    def export(
        self, folder: str, step: int | None = None, format: str = "huggingface", dtype: str | None = None, *,
        dataset: str | None = None, quantize: str | None = None, max_loss_increase: float = 0.05, file_mb: float = 5000.0,
    ) -> str:  # fmt: skip
        """Writes the weights of a checkpoint, by default the newest, to a new folder, as `raydist checkpoint export` does, whose
        options these are, in a process of its own; `AutoModelForCausalLM.from_pretrained` reads it. Returns the folder."""
        given = {name: value for name, value in locals().items() if name not in ("self", "folder")}
        Call(f"{__name__}:export", {**given, "run": self.folder.full_uri, "out": folder}, trusted=False).wait()
        return folder

    def replay(self, steps: int, step: int | None = None, workers: int | None = None, *, trust: bool = False) -> Replay:
        """Trains the `steps` after the checkpoint of `step` again, on another number of workers of this machine, and compares every
        bit, as `raydist checkpoint verify --replay` does. `trust`: code of your own that its spec names may run. Raises UserErrors,
        TrainingStopped."""
        from raydist.launch.replay import replay

        check_numbers(steps=(steps, 1), workers=(workers, 1))
        return replay(self.folder, steps, step, workers, trust)

    def model(self, step: int | None = None) -> nn.Module:
        """The model with the weights of a checkpoint, by default the newest, for evaluation on the CPU. Imports torch here, and the
        code of your own that the job names. Raises CheckpointNotFound."""
        from raydist.worker.checkpoint.restored_model import newest_model

        return newest_model(self.folder, step)[0]

    def sample(
        self, prompt: str = "def ", *, tokens: int = 200, temperature: float = 0.8, top_k: int = 50, seed: int = 0,
        step: int | None = None,
    ) -> str:  # fmt: skip
        """The prompt, and what the model of a checkpoint generates after it, as `raydist sample` prints it: see `model`."""
        from raydist.worker import sampling

        return sampling.of_run(self.folder, step).text(prompt, tokens, temperature, top_k, seed)

    def chat(
        self, *, system: str | None = None, tokens: int = 200, temperature: float = 0.8, top_k: int = 50, seed: int = 0,
        step: int | None = None,
    ) -> Chat:  # fmt: skip
        """A conversation with a model that was trained to chat: `chat.add("user", text)`, then `chat.answer()`. See `model`."""
        from raydist.worker import sampling

        return sampling.of_run(self.folder, step).chat(tokens, temperature, top_k, seed, system)

    def weights(self, step: int | None = None) -> dict[str, Tensor]:
        """The weights of a checkpoint, by default the newest, by name: whole, on the CPU, whatever ranks saved them, for
        `load_state_dict`. Of a script's run, too. Imports torch here. Raises CheckpointNotFound."""
        from raydist.worker.checkpoint.weights_reader import open_weights

        with open_weights(self.folder, step) as weights:
            return {name: weights.read(name) for name in weights.tensors}

    def doctor(self) -> dict[str, Any]:
        """What is wrong with it, live or over, as `raydist doctor --json` prints it: findings, looked, blind."""
        from raydist.api.fitting import say_what_fits
        from raydist.diagnosis import examine
        from raydist.report import doctor

        made = examine(self.folder)
        say_what_fits(self.folder, made)
        return doctor.facts(made)

    def profile(
        self, duration: float = 60.0, interval: float = 10.0, metrics: Sequence[str] | None = None
    ) -> list[dict[str, Any]]:
        """Measures it for `duration` seconds while it trains, as `raydist profile` does: per metric and rank, node or GPU its mean
        and extremes over intervals, compared with a threshold. Raises UsageError if it does not train."""
        from raydist.report import profile

        return profile.profile(self.folder, profile.chosen(metrics), duration, interval, lambda line: None)

    def trace(self, steps: int = 3, timeout: float = STOP_S) -> dict[str, Any]:
        """Has its next steps recorded on every rank. Returns each rank's shares, and in `path` the trace's file, for Perfetto.

        Raises UsageError if it does not train, TraceFailed if a rank has not answered in `timeout` seconds.
        """
        from raydist.report.tracing import record

        name, _, shares = record(self.folder, steps, timeout, "raydist.Run.trace", lambda line: None)
        return {**shares, "path": self.folder.storage.at(name).uri}

    def logs(self, rank: int | None = None, attempt: int | None = None) -> Iterator[tuple[int, str]]:
        """(rank, line) of what the ranks printed in an attempt, by default the newest, rank by rank. Raises UsageError for a rank
        or an attempt that there was not."""
        from raydist.run.rank_logs import reader

        return reader(self.folder, attempt, rank).read(last=True)

    def report(self, path: str | Path | None = None) -> str:
        """Writes the run's page to a path or URI, by default report.html in its folder, and returns where it is.

        Raises UsageError if `path` is a folder.
        """
        return self.write_page(path)[0]

    def write_page(self, path: str | Path | None) -> tuple[str, Report]:
        """`report`, with the figures on the page."""
        from raydist.report import run_metrics
        from raydist.report.html import run as pages

        home, name = place_of(path, self.folder.storage)
        figures = run_metrics.report(self.folder)
        home.write(name, pages.render(figures))
        return home.at(name).uri, figures

    def wait(self, timeout: float | None = None) -> Run:
        """Waits until no driver trains the run. Returns the run.

        Raises the error that ended it, with its root cause, if it did not reach its end or a pause; TimeoutError after `timeout`
        seconds. In a notebook it shows the curves of the run meanwhile.
        """
        with notebook.live(self) as refresh:
            self._until_ended(timeout, refresh)
        if self._driver is not None:
            self._driver.wait()
        elif (status := self.status) in ("stopped", "lost"):
            cause = (
                next((e.data.get("cause") for e in reversed(self.events("ended"))), None)
                if status == "stopped"
                else None
            )
            raise TrainingStopped(f"run {self.name}: {cause or status}", f"more: raydist show {self.uri}")
        return self

    def stop(self, wait: bool = True, timeout: float = STOP_S) -> Run:
        """Ends the run after one checkpoint, as `raydist stop` does; training it again resumes it. Returns the run.

        Does nothing if no driver trains it. Raises StopFailed if it has not ended in `timeout` seconds.
        """
        self._stop(wait, timeout)
        return self

    def delete(self) -> None:
        """Deletes its folder: records, logs and checkpoints. Raises UsageError if it trains, or is a cell of a sweep."""
        from raydist.api import deleting

        deleting.delete(deleting.chosen_from(self.folder).folder)

    def __repr__(self) -> str:
        return (
            f"<raydist run {self.name}: {self._state()['status']} at step {self._state().get('step') or 0}, {self.uri}>"
        )

    def _repr_html_(self) -> str:
        return notebook.card(self.folder)

    def _state(self) -> dict[str, Any]:
        from raydist.run.status import read_state

        return read_state(self.folder)


def export(
    run: str, step: int | None, out: str, format: str, dtype: str | None, dataset: str | None, quantize: str | None,
    max_loss_increase: float, file_mb: float, show: Callable[[str], None] = lambda line: None,
) -> None:  # fmt: skip
    """What `raydist checkpoint export` and `Run.export` do. Imports torch. `show` gets a line of each figure, and the folder."""
    check_numbers(max_loss_increase=(max_loss_increase, 0), file_mb=(file_mb, 0.001))
    place, folder = RunDir(run), Path(out)
    written: dict[str, Any] = {"dtype": dtype, "file_bytes": int(file_mb * 1e6)}
    if quantize is None:
        from raydist.worker.checkpoint.export import export

        show(str(export(place, step, folder, format, dataset, **written)))
        return
    if quantize != "int8":
        raise UsageError(f"--quantize {quantize}: cannot be written", "there is: int8")
    if format == "peft":
        raise UsageError("--format peft: adapters are not quantized", "leave out one of --quantize and --format")
    from raydist.worker.checkpoint.export_int8 import export_int8

    for line in (*export_int8(place, step, folder, dataset, max_loss_increase, **written).lines(), str(folder)):
        show(line)


def place_of(path: str | Path | None, home: Storage) -> tuple[Storage, str]:
    """The folder and the file name of a page: `path`, or report.html in `home`. Raises UsageError if `path` is no file."""
    if path is None:
        return home, REPORT
    if not isinstance(path, str | Path):
        raise UsageError(f"{path!r:.60} is not the name of a file", "give a path, or a URI")
    path = str(path)
    place, mark, query = path.partition("?") if "://" in path else (path, "", "")
    folder, slash, name = place.rpartition("/")
    target = Storage(f"{folder or slash or '.'}{mark}{query}")
    if not name or target.at(name).is_folder():
        raise UsageError(f"{path} is a folder", f"name a file in it, such as {place.rstrip('/')}/{REPORT}")
    if target.exists(name) and target.size(name) is None:
        raise UsageError(f"{path} is not a regular file", "name another one")
    return target, name
