"""Which files of a working directory are shipped: those that git or .gitignore files allow, without raydist's own output."""

from __future__ import annotations

import os
import subprocess
import zipfile
from pathlib import Path

import pytest

from raydist.cluster import package
from raydist.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: code and a job; runs, a sweep and data made by raydist; an environment, a cache and ignored files."""
    files = {
        "job.yaml": "name: j",
        "own/model.py": "x = 1",
        "own/__pycache__/model.pyc": "x",
        "env/pyvenv.cfg": "home = /usr",
        "env/lib/big.py": "x",
        "cache/CACHEDIR.TAG": "x",
        "cache/x": "x",
        "old/spec.yaml": "name: j",
        "old/attempts/0001.json": "{}",
        "old/checkpoints/step-00000001/shard": "x",
        "grid/sweep.yaml": "x",
        "grid/cells.jsonl": "x",
        "corpus/index.json": "{}",
        "corpus/train-000000-000.arrow": "x",
        "results/notes.txt": "x",
        ".gitignore": "*.log\n/scratch/\n",
        "a.log": "x",
        "scratch/x": "x",
        "own/.gitignore": "made.*",
        "own/made.txt": "x",
        ".rayignore": "secret.txt",
        "secret.txt": "x",
        ".env": "HF_TOKEN=x",
        "own/.env.local": "x",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


ALWAYS = {".gitignore", ".rayignore", "job.yaml", "own/.gitignore", "own/model.py"}


def git(folder: Path, *words: str) -> None:
    """Runs git in `folder`, with a test identity."""
    subprocess.run(
        ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=b", *words], check=True, timeout=240
    )


@pytest.mark.parametrize("by_git", [True, False])
def test_what_is_shipped(folder: Path, by_git: bool) -> None:
    """Environments, caches, runs, sweeps, prepared data, the storage and ignored files are left out; those made by raydist are
    reported. In a git work tree, tracked files are shipped even if ignored, and so are new files."""
    if by_git:
        git(folder, "init", "-q")
        git(folder, "add", "-f", "job.yaml", "own", "scratch", ".gitignore")
    found = package.select(folder, [str(folder / "results"), "s3://b/x"])
    tracked = {"own/made.txt", "scratch/x"} if by_git else set()
    assert set(found.files) == ALWAYS | tracked
    assert found.left_out == {
        "old": "a run", "grid": "a sweep", "corpus": "prepared data", "results": "a storage of runs",
        ".env": "a file of secrets", "own/.env.local": "a file of secrets",
    }  # fmt: skip
    assert (
        "left out: .env (a file of secrets), corpus (prepared data), grid (a sweep), old (a run), own/.env.local (a "
        in found.describe(9)
    )


@pytest.mark.parametrize("by_git", [True, False])
def test_what_a_job_names_is_shipped_all_the_same(folder: Path, by_git: bool) -> None:
    """Files and folders that a job names are shipped even if ignored; so is prepared data. Secrets in them are listed."""
    (folder / "corpus/tls.key").write_text("x")
    if by_git:
        git(folder, "init", "-q")
    found = package.select(folder, [], ["./corpus", "a.log", "own", "secret.txt"])
    more = {"a.log", "corpus/index.json", "corpus/train-000000-000.arrow", "own/made.txt", "secret.txt"}
    assert set(found.files) == ALWAYS | more | {"results/notes.txt"}
    assert "corpus" not in found.left_out
    assert found.left_out["corpus/tls.key"] == "a file of secrets"


SECRETS = {
    ".aws/credentials": ".aws", ".ssh/id_ed25519": ".ssh", "own/.kube/config": "own/.kube", ".gnupg/x": ".gnupg",
    ".docker/config.json": ".docker", ".azure/x": ".azure", ".config/gcloud/x": ".config/gcloud", "id_rsa": "",
    "own/id_ed25519_sk": "", ".envrc": "", "prod.env": "", ".pypirc": "", "service-account.json": "", "gcp_credentials.json": "",
    "own/tls.pem": "", "tls.KEY": "",
}  # fmt: skip
PLAIN = {
    ".env.example",
    "example.env",
    "own/credentials.py",
    "keys.json",
    "id_rsa.pub",
    ".config/x",
    "gym.env/x",
    "key",
}


@pytest.mark.parametrize("by_git", [True, False])
def test_secrets(folder: Path, by_git: bool) -> None:
    """Files and folders that hold secrets by their names are left out and listed, as is a link to one; what the job names is
    shipped, and not listed."""
    for name in SECRETS.keys() | PLAIN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("x")
    (folder / "plain.txt").symlink_to("own/tls.pem")
    (folder / "plain").symlink_to(".ssh")
    if by_git:
        git(folder, "init", "-q")
        git(folder, "add", "-f", ".")
    found = package.select(folder, [], ["prod.env"])
    assert found.files.keys() >= PLAIN | {"prod.env"}
    assert not found.files.keys() & (SECRETS.keys() | {"plain.txt", "plain/id_ed25519"}) - {"prod.env"}
    folders = set(SECRETS.values()) - {""} | {"plain"}
    files = {name for name, inside in SECRETS.items() if not inside} - {"prod.env"} | {"plain.txt"}
    kinds = dict.fromkeys(folders, "a folder of secrets") | dict.fromkeys(files, "a file of secrets")
    assert found.left_out.items() >= kinds.items()
    assert "prod.env" not in found.left_out


@pytest.mark.parametrize("by_git", [True, False])
def test_links_out_of_the_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory, by_git: bool) -> None:
    """A link that leads elsewhere is left out and listed, one that git ignores or that leads nowhere is not listed; what the job
    names is shipped, with its links."""
    other = tmp_path_factory.mktemp("other")
    (other / "text.txt").write_text("x")
    (folder / "data").mkdir()
    for name, to in (("pw", other / "text.txt"), ("all", other), ("data/a.txt", other / "text.txt"), ("b.log", other)):
        (folder / name).symlink_to(to)
    (folder / "lost").symlink_to("no/such")
    (folder / "round").symlink_to("round")
    if by_git:
        git(folder, "init", "-q")
    found = package.select(folder)
    out = {"pw", "all", "data/a.txt"}
    assert {name for name, what in found.left_out.items() if what == "a link out of the folder"} == out
    assert not [name for name in found.files if name.startswith(("pw", "all", "data/", "b.log", "lost", "round"))]
    found = package.select(folder, [], ["data", "pw", "all"])
    assert found.files.keys() >= {"data/a.txt", "pw", "all/text.txt"}
    assert not found.left_out.keys() & out


def test_other_repositories_and_links(folder: Path) -> None:
    """A nested repository, which git lists as one name, is shipped by its own rules. A link to a folder is followed, a link back
    only once. A work tree in which git ignores everything is read like any folder."""
    git(folder, "init", "-q")
    git(folder / "own", "init", "-q", "inner")
    (folder / "own/inner/code.py").write_text("x")
    (folder / "own/inner/.gitignore").write_text("no.py")
    (folder / "own/inner/no.py").write_text("x")
    (folder / "scratch/deep").mkdir()
    (folder / "scratch/deep/y.py").write_text("x")
    (folder / "linked").symlink_to("scratch/deep")
    (folder / "own/back").symlink_to("..")
    found = set(package.select(folder).files)
    assert {"own/inner/code.py", "linked/y.py"} < found
    assert not {"own/inner/no.py", "scratch/deep/y.py"} & found
    assert not any(name.startswith("own/back/own/back/") for name in found)
    assert set(package.select(folder / "scratch/deep").files) == {"y.py"}


def test_the_archive(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """It has the files with their modes; equal files give equal bytes, so that Ray does not upload them again."""
    (folder / "own/model.py").chmod(0o755)
    out = tmp_path_factory.mktemp("out")
    chosen = package.select(folder)
    assert chosen.write(out / "a.zip", 1 << 20) == (out / "a.zip").stat().st_size
    os.utime(folder / "job.yaml", (5e8, 5e8))
    package.select(folder).write(out / "b.zip", 1 << 20)
    assert (out / "a.zip").read_bytes() == (out / "b.zip").read_bytes()
    with zipfile.ZipFile(out / "a.zip") as archive:
        assert archive.namelist() == sorted(chosen.files)
        assert archive.read("job.yaml") == b"name: j"
        assert archive.getinfo("own/model.py").external_attr >> 16 & 0o777 == 0o755


def test_a_package_that_is_too_large(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The error has the size, the largest files and folders, and the remedy; the archive is not written to its end."""
    (folder / "weights").mkdir()
    (folder / "weights/big.bin").write_bytes(os.urandom(6 << 20))
    (folder / "weights/big2.bin").write_bytes(os.urandom(2 << 20))
    out = tmp_path_factory.mktemp("out") / "a.zip"
    with pytest.raises(
        UserError, match=r"big.bin 6.0 MiB, weights/big2.bin 2.0 MiB.*by folder: weights/ 8.0"
    ) as caught:
        package.select(folder).write(out, 1 << 20)
    assert "8.0 MiB, make a package of more than 1.0 MiB" in caught.value.message
    assert ".rayignore" in caught.value.hint
    assert out.stat().st_size < 4 << 20


def test_a_file_that_cannot_be_read(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The error names the file and the reason."""
    chosen = package.select(folder)
    (folder / "job.yaml").unlink()
    with pytest.raises(UserError, match=r"job.yaml: cannot be shipped: No such file"):
        chosen.write(tmp_path_factory.mktemp("out") / "a.zip", 1 << 20)


def test_the_limits_are_ray_s() -> None:
    """They equal the limits of the installed Ray."""
    from ray._private import ray_constants

    assert ray_constants.DASHBOARD_CLIENT_MAX_SIZE == package.JOBS_LIMIT
    assert ray_constants.GRPC_CPP_MAX_MESSAGE_SIZE == package.HEAD_LIMIT


def test_what_of_this_repository_is_shipped(tmp_path: Path) -> None:
    """By `ray job submit --working-dir .` and by raydist: the package, jobs and sweeps; no tests, docs or caches."""
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import create_package

    root = Path(__file__).parents[2]
    create_package(
        str(root), tmp_path / "p.zip", include_gitignore=True, excludes=list(get_runtime_env_default_excludes())
    )
    with zipfile.ZipFile(tmp_path / "p.zip") as archive:
        by_ray = set(archive.namelist())
    ours = set(package.select(root).files)
    for found in (by_ray, ours):
        assert {
            "raydist/cli/main.py",
            "raydist/launch/agent.py",
            "jobs/quickstart.yaml",
            "tune_sweeps/lr-batch.yaml",
        } < found
        assert not {name.split("/")[0] for name in found} & {
            "tests",
            "docs",
            "benchmarks",
            "deploy",
            "runs",
            ".venv",
            ".git",
        }
    assert {name for name in by_ray if name.startswith("raydist/")} == {n for n in ours if n.startswith("raydist/")}
