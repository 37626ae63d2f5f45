"""Runs the commands of a new user's first day in a clone of this repository, and writes a transcript.

    python docs/walk.py                    the real one, from nothing, installation and all, into docs/tutorials/first-day.md
    python docs/walk.py --short VENV       as a test does it: with VENV's packages, and jobs cut to a few steps of a tiny model

The commands are WALK. They run one after another, as in one shell; the first that fails ends the walk. README's commands between
`<!-- walk -->` and `<!-- end -->` are among them, in their order (tests/end_to_end/test_walk.py). The clone is of the commit that
is checked out, with the changes that are not committed yet.

In the transcript, of an output longer than 45 lines the first 26 and the last 18 are shown, and lines are cut at 150 characters.
The folder of the walk is ~, and this machine's address is 10.0.0.1.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tutorials" / "first-day.md"
_HEAD, _TAIL, _MOST, _WIDE = 26, 18, 45, 150
_ACTIVATE = ". .venv/bin/activate"


@dataclass(frozen=True)
class Step:
    """`told`: what the reader should know before it."""

    command: str
    told: str


WALK = (
    Step(
        "make quickstart",
        "Installs raydist into `.venv`, makes a corpus of the Python standard library's source, trains a GPT on two workers, shows "
        "the run and prints a sample of its text. After 200 steps the model produces letters, spaces and short words; its text "
        "is not yet Python. `eval` is the loss on held-out text, in nats per byte: 5.55 for an untrained model, 3.16 for a model "
        "that predicts from the frequencies of bytes alone.",
    ),
    Step(_ACTIVATE, "The command is `.venv/bin/raydist`; with the virtual environment active, `raydist`."),
    Step("raydist runs", "Lists the runs, which are in `./runs`."),
    Step("raydist show quickstart", "Losses, attempts and checkpoints of the run."),
    Step("raydist logs quickstart", "The output of its workers."),
    Step('raydist sample quickstart --prompt "import "', "Samples text from its newest checkpoint."),
    Step(
        "raydist report quickstart -o report.html", "Writes the run's report: one page, which opens without a network."
    ),
    Step("raydist checkpoint list quickstart", "Lists the checkpoints on storage."),
    Step(
        "raydist train jobs/quickstart.yaml --set train.steps=400",
        "Continues the finished run, from step 200 to step 400.",
    ),
    Step("raydist plan jobs/quickstart.yaml", "The memory that the job needs on each device, under each strategy."),
    Step(
        "raydist plan jobs/deepseek_7b_zero3.yaml --device h100",
        "The same for a 7B model on 32 GPUs, with an estimate of the speed.",
    ),
    Step(
        "raydist sweep tune_sweeps/lr-batch.yaml --dry-run",
        "Lists the jobs that the sweep would train, without training them.",
    ),
    Step(
        "raydist train jobs/python-10min.yaml",
        "Trains a model whose text reads like Python, on two cores in about ten minutes. Its tokens are pieces of words "
        "(`bpe:2048`), of 3.2 bytes on average; its loss is in nats per token.",
    ),
    Step(
        'raydist sample python-10min --prompt "class "',
        "The text has Python's names, indentation and blocks; the program makes no sense.",
    ),
    Step("raydist rm quickstart --yes", "Deletes a run, with its checkpoints."),
)


def main() -> None:
    """Walks, and writes the page. Exit code 1 if a command failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PAGE, help="the page")
    parser.add_argument(
        "--short", metavar="VENV", type=Path, help="a few steps of tiny models, with the packages of VENV"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="raydist-walk-") as folder:
        home = Path(folder).resolve()
        clone(home / "raydist")
        if options.short is not None:
            borrow(options.short, home / "raydist")
            shorten(home / "raydist" / "jobs")
        passages, failed = walk(home)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(page(passages, options.short is not None), encoding="utf-8")
    if failed is not None:
        sys.exit(f"failed: {failed}\n{passages[-1][2]}")


def clone(there: Path) -> None:
    """A clone of this repository, with the changes that are not committed yet."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(there)], check=True)
    listing = ["git", "ls-files", "-z", "--modified", "--others", "--exclude-standard"]
    for name in subprocess.run(listing, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout.split("\0")[
        :-1
    ]:
        (there / name).unlink(missing_ok=True)
        if (ROOT / name).exists():
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, there / name, follow_symlinks=False)


def walk(home: Path) -> tuple[list[tuple[Step, float, str]], str | None]:
    """Of each step its seconds and its output; and the command that failed, if one did, after which none was run."""
    kept = ("PATH", "LANG", "TERM", "TMPDIR")
    env = {
        k: v
        for k, v in os.environ.items()
        if k in kept or k.startswith(("PIP_", "SSL_")) or k.lower().endswith("_proxy")
    }
    env |= {"HOME": str(home), "COLUMNS": "120"}
    passages: list[tuple[Step, float, str]] = []
    before = "true"
    for step in WALK:
        begun = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", f"{before} && {step.command}"],
            cwd=home / "raydist",
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        passages.append((step, time.monotonic() - begun, shown(done.stdout.decode(errors="replace"), home)))
        print(f"{passages[-1][1]:7.1f} s  {step.command}", file=sys.stderr, flush=True)
        if done.returncode:
            return passages, step.command
        if step.command == _ACTIVATE:
            before = step.command
    return passages, None


def shown(output: str, home: Path, most: int | None = _MOST) -> str:
    """The output as the page has it: see above. `most`: longer ones are cut; None: all lines."""
    output = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    for address in {
        a.address for all_of in psutil.net_if_addrs().values() for a in all_of if a.family.name == "AF_INET"
    }:
        if not address.startswith("127."):
            output = output.replace(address, "10.0.0.1")
    output = output.replace(str(home), "~").replace(platform.node(), "host")
    output = re.sub(r"(?<!\S)/\S+/(?=python[\d.]* -m venv)", "", output)  # where this machine has its Python
    # A model that has learnt little yields control characters, which Markdown cannot show.
    output = "".join(c if c.isprintable() or c in "\n\r" else "\ufffd" for c in output.expandtabs())
    lines = [line.rpartition("\r")[2].rstrip() for line in output.strip("\n").replace("\r\n", "\n").split("\n")]
    if most is not None and len(lines) > most:
        lines[_HEAD:-_TAIL] = [f"... {len(lines) - _HEAD - _TAIL} lines ..."]
    return "\n".join(line if len(line) <= _WIDE else f"{line[: _WIDE - 3]}..." for line in lines)


def page(passages: list[tuple[Step, float, str]], short: bool) -> str:
    """The transcript as Markdown."""
    memory = psutil.virtual_memory().total / 2**30
    told = [
        "# The first day",
        "",
        textwrap.fill(
            "Written by `python docs/walk.py`, which runs these commands one after another in a fresh clone, with an empty home "
            f"folder, and notes the seconds: here on {os.cpu_count()} cores with {memory:.0f} GiB of memory, "
            f"Python {platform.python_version()}. Of an output longer than {_MOST} lines the first {_HEAD} and the last {_TAIL} "
            f"are shown, and lines are cut at {_WIDE} characters. "
            + (
                "**This is the short walk**: nothing was installed, and jobs were cut to a few steps of a tiny model."
                if short
                else "A test walks the same way with jobs of a few steps."
            ),
            width=130,
        ),
        "",
        "    git clone REPOSITORY raydist",
        "    cd raydist",
    ]
    for step, seconds, output in passages:
        told += ["", f"## `{step.command}`", "", textwrap.fill(f"{step.told} **{seconds:.1f} s.**", width=130)]
        if output:
            told += ["", *(f"    {line}".rstrip() for line in output.split("\n"))]
    return "\n".join(told) + "\n"


def borrow(venv: Path, there: Path) -> None:
    """Makes `.venv` in the clone as `make install` does, but with the packages of another: nothing is installed."""
    made = there / ".venv"
    subprocess.run([str(venv / "bin" / "python"), "-m", "venv", "--without-pip", str(made)], check=True)
    (packages,) = made.glob("lib/python*/site-packages")
    (others,) = venv.glob("lib/python*/site-packages")
    (packages / "walk.pth").write_text(f"{there}\n{others}\n")
    command = made / "bin" / "raydist"
    command.write_text(f"#!{made}/bin/python\nfrom raydist.cli.main import main\nmain()\n")
    command.chmod(0o755)
    (made / ".run").touch()
    # With the sources' times, so that what is compiled here is valid there; a raydist that is installed has been compiled, too.
    shutil.copytree(ROOT / "raydist", there / "raydist", dirs_exist_ok=True)


def shorten(jobs: Path) -> None:
    """Cuts the jobs to a few steps of a tiny model of bytes. The commands stay as they are."""
    tiny = {"name": "gpt", "layers": 1, "width": 32, "heads": 2, "context": 32}
    for path in (jobs / "quickstart.yaml", jobs / "python-10min.yaml"):
        job = yaml.safe_load(path.read_text(encoding="utf-8"))
        job["model"] = tiny
        job["data"] = {"source": "python-stdlib", "tokenizer": "bytes"}
        job["train"] |= {"steps": 4, "global_batch": 4, "micro_batch": 2}
        job["checkpoint"] = {"every": 200}
        job["optim"]["schedule"]["warmup"] = 0.1
        job["eval"] = {"every": 200, "batches": 2}
        path.write_text(yaml.safe_dump(job), encoding="utf-8")


if __name__ == "__main__":
    main()
