"""Users' mistakes, for every command: exit code 2, a few lines, the remedy, and never a traceback."""

from __future__ import annotations

import errno
import gzip
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from raydist.cli.main import main
from raydist.data import documents
from tests.stderr import without_stages

NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files with one mistake each, beside a valid job and its text."""
    root = tmp_path_factory.mktemp("bad")
    one: dict[str, Any] = {"name": "j", "data": {"source": "good.txt"}, "train": {"steps": 3}}
    job = {**one, "eval": {"every": None}}
    files: dict[str, str | bytes] = {
        "job.yaml": yaml.safe_dump(job),
        "one.yaml": yaml.safe_dump(one),
        "grid.yaml": yaml.safe_dump({"base": "one.yaml", "array": {"parameters": [{"learning_rate": [1e-3, 1e-2]}]}}),
        "far.yaml": yaml.safe_dump({**job, "data": {"source": "../elsewhere.txt"}}),
        "orphan.yaml": "base: nosuch.yaml\narray: {parameters: [{learning_rate: [1.0e-3]}]}\n",
        "circle.yaml": "extends: circle.yaml\n",
        "syntax.yaml": "a: [1\nb: }",
        "empty.yaml": "",
        "binary.yaml": b"\xff\xfe\x00",
        "binary.py": b"\xff\xfe\x00",
        "zero.yaml": b"name: a\0b\n",
        "list.yaml": "[1, 2]",
        "deep.yaml": "[" * 600,
        "bad.json": '{"a":',
        "fault.yaml": "- {fault: nosuch}\n",
        "good.txt": "hello " * 500,
        "latin.txt": b"caf\xe9\n",
        "empty.txt": "",
        "cut.txt.gz": gzip.compress(os.urandom(1000))[:500],
        "not.txt.zst": "plain text",
        "not.parquet": b"PAR1xxxx",
        "chat.jsonl": '{"prompt": "a", "completion": "b"}\n',
        "cut.jsonl": '{"text": "a"}\n{"text": "b"\n',
        "column.jsonl": '{"text": "a"}\n{"tex": "b"}\n',
        "deep.jsonl": '{"text": ' + "[" * 100_000 + "\n",
        "null.py": "a = 1\0",
        "nested.py": "x = " + "-" * 200_000 + "1\n",
        "sized.yaml": yaml.safe_dump(
            {
                **job,
                "data": {"source": "/x.txt"},
                "cluster": {"resources": {"nodes": 1, "cpus": 4, "gpus": 0, "memory_gib": 8}},
            }
        ),
        "aliases.yaml": "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 40)),
        "zero_parent.yaml": "extends: /dev/zero\n",
        **{f"chain{i}.yaml": f"extends: chain{i + 1}.yaml\n" for i in range(30)},
        "large.yaml": "name: j\n#" + "x" * 10_000_000,
        "list_key.yaml": "? [1, 2]\n: 3\n",
        "number_key.yaml": "name: j\n7: 3\n",
        "digits.yaml": f"name: j\ntrain: {{steps: {'9' * 5000}}}\n",
        "endless.jsonl": '{"text": "' + "x" * (5 << 20),
        "digits.json": f'{{"train_batch_size": {"9" * 5000}}}',
        "slow_data.yaml": "- {fault: slow_data, rank: 0, step: 1, seconds: 1}\n",
        "ok.py": "pass\n",
        "bad_import.py": "raise RuntimeError('at import')\n",
        "bad_syntax.py": "def x(:\n",
        "bad_need.py": "import no_such_library\n",
        "bad_rows.py": "def rows():\n    yield 'one'\n    raise ValueError('row 2')\ndef needs(a):\n    return a\n",
    }
    for name, content in files.items():
        (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    (root / "dir.yaml").mkdir()
    (root / "dir.py").mkdir()
    os.mkfifo(root / "fifo")
    return root


JOB_FILES = {
    "nosuch.yaml": "no such file", "syntax.yaml": "not valid YAML", "empty.yaml": "holds NoneType", "binary.yaml": "cannot be read",
    "zero.yaml": "not valid YAML", "list.yaml": "holds list", "dir.yaml": "Is a directory",
}  # fmt: skip
HOSTILE = {
    "aliases.yaml": "its aliases expand to more than 4 MiB, the limit", "zero_parent.yaml": "is not a regular file",
    "chain0.yaml": "a chain of more than 20 files, the limit", "large.yaml": "has more than 1 MiB, the limit",
    "list_key.yaml": "is no text: put it in quotes", "number_key.yaml": "the key 7 is no text: put it in quotes",
    "digits.yaml": "an integer of 5000 digits: the limit is 100",
}  # fmt: skip
SOURCES = {
    "nosuch": "no such file", "'no*.txt'": "no match", "''": "a source has no name", "empty.txt": "is empty",
    "latin.txt": "latin.txt: bad UTF-8: byte 0xe9 at offset 3", "cut.txt.gz": "cut.txt.gz cannot be read",
    "not.txt.zst": "not.txt.zst cannot be read", "not.parquet": "not.parquet: not a readable Parquet file",
    "cut.jsonl": "cut.jsonl: line 2: not JSON", "column.jsonl": 'column.jsonl: line 2: no column "text"',
    "deep.jsonl": "deep.jsonl: line 1: nested too deeply", "http://127.0.0.1:1/a.txt": "download it first",
    "ftp://h/x": "source ftp://h/x", "hf://one": "HF_TOKEN",
    "nomodule:x": "no module 'nomodule'", "bad_rows:nosuch": "has no 'nosuch'",
    "bad_import:x": "bad_import.py, line 1, in <module>", "bad_syntax:x": "bad_syntax.py, line 1",
    "bad_need:x": "No module named 'no_such_library'", "bad_rows:rows": "ValueError: row 2",
    "bad_rows:needs": "needs() missing 1 required",
}  # fmt: skip
COMMANDS = {
    **{f"train {name}": says for name, says in JOB_FILES.items()},
    **{f"sweep {name}": says for name, says in JOB_FILES.items()},
    **{f"submit {name} --address {NOWHERE}": says for name, says in JOB_FILES.items()},
    **{f"plan {name}": JOB_FILES[name] for name in ("nosuch.yaml", "syntax.yaml")},
    **{f"bench comm {name}": JOB_FILES[name] for name in ("nosuch.yaml", "dir.yaml")},
    **{f"data prepare {name} --out made": says for name, says in SOURCES.items()},
    "train deep.yaml": "nested too deeply",
    **{f"{command} {name}": says for command in ("train", "plan") for name, says in HOSTILE.items()},
    **{f"sweep {name}": HOSTILE[name] for name in HOSTILE if name not in ("zero_parent.yaml", "chain0.yaml")},
    "convert deepspeed digits.json": "an integer of 5000 digits: the limit is 100",
    "data prepare endless.jsonl --out made": "endless.jsonl: line 1: a line of more than 4 MiB",
    **{
        f"{command} job.yaml --set cluster.workers=2 --set 'comm={{compress: powersgd, options: {{rank: 999}}}}'":
        "job.yaml: comm.options.rank: 999: no matrix of the model is larger than its factors"
        for command in ("train", "plan", "check")
    },
    "plan job.yaml --set model.layers=1000000": "model.layers: 1000000",
    "plan job.yaml --set train.global_batch=1000000000000000": "train.global_batch: 1000000000000000",
    f"train job.yaml --set train.steps={'9' * 5000}": "is not YAML; quote it",
    f"train job.yaml --set {'x' * 5000}=1": "xxx",
    "train job.yaml --set 'observe.exporters=[os:getcwd]'": "observe.exporters: os:getcwd: is not an exporter",
    "sample nosuch --temperature inf": "--temperature",
    "sample nosuch --temperature nan": "--temperature",
    f"sample nosuch --seed {1 << 64}": "--seed",
    "bench comm --max-bytes 99999999TiB": "give at most 64GiB, the limit",
    "train one.yaml": "its 0 held-out documents make no sample",
    "train circle.yaml": "goes round in a circle",
    "train grid.yaml": "raydist sweep grid.yaml",
    "sweep job.yaml": "raydist train job.yaml",
    "sweep orphan.yaml": "nosuch.yaml: no such file",
    "convert deepspeed bad.json": "not valid JSON",
    "convert deepspeed nosuch.json": "no such file",
    "train job.yaml --deepspeed dir.yaml": "Is a directory",
    "train job.yaml --faults fault.yaml": "unknown 'nosuch'",
    "train job.yaml --faults syntax.yaml": "not valid YAML",
    "train job.yaml --set train.steps": "--set optim.lr=3e-4",
    "train job.yaml --set train.steps=-1": "greater than or equal to 1",
    "train job.yaml --set 'train.steps=['": "quote it",
    "train job.yaml --set 'data.source=my #1 file.txt'": "'my #1 file.txt' has a #, which begins a comment in YAML; quote it",
    "train job.yaml --set 'name=#1'": "has a #, which begins a comment in YAML; quote it",
    "train job.yaml --set 'data.source=&x y.txt'": "'&x y.txt' begins with &, which names a value in YAML; quote it",
    "train job.yaml --set nosuch.x=1": "fields here",
    "train job.yaml --set 'cluster.env={\"a=b\": x}'": "is a variable that no process can have",
    "train job.yaml --set 'cluster.env={\"\": x}'": "is a variable that no process can have",
    "train job.yaml --set 'checkpoint.replicas=[\"\"]'": "checkpoint.replicas: the name of a storage is empty",
    "train job.yaml --set 'checkpoint.replicas=[foo://x]'": "checkpoint.replicas: storage 'foo://x'",
    "train job.yaml --set train.steps=true": "train.steps: True is no number",
    "train job.yaml --set optim.lr=yes": "is no number",
    "train job.yaml --set 'hooks=[{name: nosuch}]'": "none is built in",
    "train job.yaml --set data.source=bad_import:x": "fix it there",
    "train job.yaml --set data.path=hf://one": "HF_TOKEN",
    "train job.yaml --set init_from=nosuch": "init_from: no run 'nosuch'",
    "train job.yaml --set data.batching='{max_tokens: 64, min: 3, max: 2}'": "set min to at most max",
    "train job.yaml --until 0": "--until",
    "train job.yaml --address ray://h:1": "HOST:PORT",
    "train job.yaml --address http://h:8265": "the address of a dashboard",
    "train job.yaml --address 127.0.0.1:1": "Connection refused",
    "sweep grid.yaml --address 127.0.0.1:1": "Connection refused",
    "sweep grid.yaml --dry-run --address 127.0.0.1:1": "Connection refused",
    "bench comm --address 127.0.0.1:1": "Connection refused",
    "data prepare good.txt --out made --address 127.0.0.1:1": "Connection refused",
    f"submit job.yaml --address {NOWHERE}": "Connection refused",
    f"submit grid.yaml --address {NOWHERE}": "Connection refused",
    "submit job.yaml --address ''": "http://HEAD:8265",
    f"submit far.yaml --address {NOWHERE}": "data.source: ../elsewhere.txt is not under",
    f"submit job.yaml --address {NOWHERE} --set data.path=nosuch": "data.path: nosuch is not under",
    f"submit job.yaml --address {NOWHERE} --working-dir /no/such": "is not under the working directory",
    **{
        f"{command} nosuch": "nosuch"
        for command in ("show", "report", "sample", "watch", "profile", "trace", "checkpoint list", "checkpoint verify",
                        "checkpoint prune", "data show", "data verify", "sweep results", "sweep best", "sweep report")
    },
    **{f"{command} foo://x/y": "foo://x/y" for command in ("show", "data show", "sweep results", "runs --storage")},
    **{
        f"{command} '~nosuch/x'": "~nosuch/x"
        for command in ("show", "data show", "train", "convert deepspeed", "sweep results", "run", "data prepare --out made",
                        "data prepare good.txt --out made --tokenizer")
    },
    "train job.yaml --set data.path=~nosuch/x": "~nosuch/x",
    **{
        command.format(name): "is not a regular file"
        for command in ("data prepare good.txt --out made --tokenizer {}", "plan job.yaml --set data.tokenizer={}",
                        "data prepare chat.jsonl --out made --format chat --chat-template {}",
                        "plan job.yaml --set 'model={{name: transformers, options: {{config: {}}}}}'")
        for name in ("fifo", "/dev/zero")
    },
    **{f"{command} file://host/x": "has a host or a relative path" for command in ("show", "runs --storage", "data show")},
    **{f"{command} \udcff": "is not UTF-8" for command in ("show", "runs --storage", "data show")},
    "checkpoint export nosuch --out x": "nosuch",
    "plan job.yaml --memory x": "write 80GiB",
    "plan job.yaml --memory 80": "--memory 80: has no unit, and no device has 80 bytes",
    "plan job.yaml --device nosuch": "no GPU with a known peak",
    "plan job.yaml --gpus 0": "--gpus",
    "plan sized.yaml --scaling --device h100 --vocab 300 -o nosuch/page.html": "nosuch/page.html: cannot be written",
    **{
        f"{command} ''": "is empty"
        for command in ("data prepare good.txt --out", "runs --storage", "train job.yaml --faults", "report nosuch -o",
                        "plan job.yaml --memory", "deploy slurm sized.yaml --out", "data prepare good.txt --out m --tokenizer",
                        "train job.yaml --address", "data prepare good.txt --out m --address", "bench comm --address")
    },
    "deploy compose sized.yaml --image i --out=": "--out: is empty",
    "bench comm --min-bytes x": "write 4MiB",
    "bench comm --workers 1": "--workers",
    "trace x --steps -1": "--steps",
    "run nosuch.py": "No such file",
    "run dir.py": "Is a directory",
    "run fifo": "is not a regular file",
    "run /dev/zero": "is not a regular file",
    "run bad_syntax.py": "line 1",
    "run null.py": "null",
    "run binary.py": "binary.py: source code string cannot contain null bytes",
    "run nested.py": "nested too deeply",
    "run ok.py --name a/b": "run name 'a/b'",
    "train job.yaml --name ''": "run name ''",
    f"submit job.yaml --address {NOWHERE} --name a/b": "run name 'a/b'",
    "run ok.py --workers 0": "--workers",
    "run ok.py --cpus nan": "--cpus nan: is not a number",
    "run ok.py --set nosuch.x=1": "is not a field of a script's job",
    "run ok.py --faults slow_data.yaml": "is for raydist's own loader",
    "run ok.py --storage good.txt": "cannot be stored",
    "run ok.py --storage /proc/x": "give another --storage",
    "data prepare good.txt --out /proc/x": "give another folder",
    "data prepare good.txt --out good.txt/x": "give another folder",
    "run ok.py --address 127.0.0.1:1": "Connection refused",
    "run /bin/true --address 127.0.0.1:1": "/bin/true",
    "checkpoint now nosuch": "nosuch",
    "checkpoint now nosuch --timeout nan": "--timeout",
    "dashboard nosuch --allow-actions": "does not exist",
    "dashboard good.txt --allow-actions": "is no folder",
    "dashboard . --host ''": "--host: is empty",
    "dashboard . --host nosuch.invalid --port 0": "cannot listen there",
    "deploy kuberay job.yaml": "--image",
    "deploy kuberay sized.yaml --image 'a b' --storage s3://b": "image: 'a b' is refused",
    "deploy kuberay sized.yaml --image i --storage runs": "no other pod would see it",
    "deploy kuberay sized.yaml --image i --storage s3://b --claim x": "is not NAME:/PATH",
    "deploy kuberay sized.yaml --image i --storage s3://b --node-selector 'a b=x'": "'a b' is refused",
    "deploy kuberay sized.yaml --image i --storage s3://b --network 'a b'": "'a b' is refused",
    "deploy kuberay sized.yaml --image i --storage s3://me:secret@b": "contains secrets",
    "deploy slurm job.yaml": "cluster.resources",
    "deploy slurm sized.yaml --time '1 2'": "is not an option of sbatch",
    "deploy slurm sized.yaml --storage s3://me:secret@b": "contains secrets",
    "deploy compose sized.yaml --image ''": "--image ''",
    "deploy compose ../sized.yaml": "only this folder is in the containers",
    "deploy compose sized.yaml --out good.txt": "--out good.txt: cannot be made: File exists",
    "deploy slurm sized.yaml --out /proc/x": "--out /proc/x: cannot be made",
    **{f"check {name}": JOB_FILES[name] for name in ("nosuch.yaml", "syntax.yaml")},
    "check --set nosuch.x=1": "fields here",
    "check --slow 2": "--slow",
    "check --slow nan": "--slow",
    "check --storage good.txt": "give a --storage that can be written",
    "check --address 127.0.0.1:1": "Connection refused",
    "nosuch": "No such command",
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_mistake_is_one_clear_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    """Exit code 2 and at most four lines with the expected message; no traceback, which `main` would not catch."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(documents, "LONGEST_LINE", 4 << 20)
    monkeypatch.setenv("RAYDIST_STORAGE", str(tmp_path / "runs"))
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with pytest.raises(SystemExit) as caught:
        main(shlex.split(command))
    told = capsys.readouterr()
    assert caught.value.code == 2, told
    assert COMMANDS[command] in told.err
    assert "Traceback" not in told.err
    assert told.out == ""
    assert len(without_stages(told.err).splitlines()) <= 4, told.err


def run(*words: str, cwd: Path, **streams: Any) -> subprocess.CompletedProcess[str]:
    """The command in its own process."""
    command = [sys.executable, "-m", "raydist", *words]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": ""}
    return subprocess.run(command, cwd=cwd, env=environment, text=True, timeout=240, check=False, **streams)


def test_a_disk_without_room_for_stdout(tmp_path: Path) -> None:
    """One line, without Python's own message at exit, for long output and for short output."""
    for command in (["schema"], ["--version"]):
        with open("/dev/full", "w") as full:
            done = run(*command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (3, "raydist: stdout cannot be written: No space left on device\n")


def test_a_reader_that_is_gone(tmp_path: Path) -> None:
    """`raydist schema | head -1`: no error, for output that is longer than the buffer, and for output that is shorter."""
    for command in (["schema"], ["--version"]):
        read, written = os.pipe()
        os.close(read)
        with os.fdopen(written, "w") as pipe:
            done = run(*command, cwd=tmp_path, stdout=pipe, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, "")


def test_a_pipe_that_is_not_the_reader_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same error of another pipe is an error of raydist itself."""

    def broken(*given: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setenv("RAYDIST_CACHE", str(tmp_path))  # for its traceback
    monkeypatch.setattr("raydist.cli.schema.job_schema", broken)
    with pytest.raises(SystemExit) as ended:
        main(["schema"])
    assert ended.value.code == 70
    assert "Broken pipe" in capfd.readouterr().err


def test_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    """The error says so."""
    gone = tmp_path / "gone"
    gone.mkdir()
    command = [
        "sh",
        "-c",
        f'rmdir "{gone}"; exec "$@"',
        "sh",
        sys.executable,
        "-c",
        "from raydist.cli.main import main; main()",
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [*command, "schema"], cwd=gone, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-2] == "raydist: the working directory no longer exists"
    assert "Traceback" not in done.stderr
