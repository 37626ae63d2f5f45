"""Selects the files of a working directory that are shipped to a cluster, and writes them into one archive.

Runs in: the driver, and `raydist submit`. Imports ray inside functions; never torch.

Inside a git work tree: the tracked files, and untracked ones that .gitignore does not exclude. Elsewhere Ray's own parser
reads the .gitignore files. .rayignore files apply everywhere. Always left out: .git, virtual environments, caches
(`CACHEDIR.TAG`), and raydist's own output: runs, sweeps, prepared data, and storages of runs; files of secrets, by their names;
links out of the folder. A file or folder that the job names is shipped even if one of these rules excludes it.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from raydist.errors import UserError
from raydist.paths import local_path
from raydist.run.directory import ATTEMPTS, EVENTS, SPEC, STATE
from raydist.run.sweep_directory import CELLS, SWEEP

JOBS_LIMIT = 100 << 20
"""Largest package in bytes that a cluster's Jobs API accepts (ray_constants.DASHBOARD_CLIENT_MAX_SIZE; no option changes it)."""
HEAD_LIMIT = 512 << 20
"""Largest package in bytes that a head accepts from a driver (packaging.GCS_STORAGE_MAX_SIZE or RAY_max_grpc_message_size)."""
_LARGE = 10 << 20
_LARGEST = 5
_CHUNK = 1 << 20
_ENV = r"\.env(?!\.(example|sample|template)$)(\..+)?"
_SECRETS = re.compile(
    rf"{_ENV}|(?!(example|sample|template)\.).+\.env|\.envrc|.+\.(pem|key|p12|pfx)|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|"
    r"\.netrc|\.git-credentials|\.pypirc|\.npmrc|\.pgpass|\.dockercfg|\.s3cfg|\.boto|kubeconfig|"
    r"(.+[-_.])?service[-_]?account([-_.].+)?\.json|(.+[-_.])?credentials(\.json)?",
    re.IGNORECASE,
)
"""Files that are never shipped, unless the job names them: a cluster's nodes and its head keep what is shipped."""
_SECRET_FOLDERS = re.compile(
    rf"(.*/)?({_ENV}|\.ssh|\.aws|\.kube|\.gnupg|\.docker|\.azure|\.config/gcloud)", re.IGNORECASE
)
"""Folders of which the same holds, by their names with `/`."""
_OUT = "a link out of the folder"
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Date of every file in the archive: equal files give equal archives, and Ray does not upload an archive that it has."""


@dataclass(frozen=True, slots=True)
class Package:
    """`files` of `root`: relative name with `/` -> bytes. `left_out`: secrets, links out of `root`, and folders that raydist has
    made -> their kind, "a run"."""

    root: Path
    files: Mapping[str, int]
    left_out: Mapping[str, str]

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(self.files.values())

    def largest(self) -> str:
        """The largest files and the largest top-level folders, as text."""
        folders: Counter[str] = Counter()
        for name, size in self.files.items():
            if "/" in name:
                folders[name.split("/", 1)[0] + "/"] += size
        largest = Counter(dict(self.files)).most_common(_LARGEST)
        text = ", ".join(f"{name} {mib(size)}" for name, size in largest)
        if folders:
            text += f"; by folder: {', '.join(f'{n} {mib(s)}' for n, s in folders.most_common(_LARGEST))}"
        return text

    def describe(self, packed: int) -> str:
        """A line for the user: what is shipped, and `left_out`. `packed`: bytes of the archive."""
        text = f"ships {len(self.files)} files of {self.root}: {mib(self.size)}, {mib(packed)} packed"
        if packed >= _LARGE:
            text += f"; the largest: {self.largest()}"
        if self.left_out:
            names = sorted(self.left_out)
            more = f" and {len(names) - _LARGEST} more" if len(names) > _LARGEST else ""
            text += f"; left out: {', '.join(f'{n} ({self.left_out[n]})' for n in names[:_LARGEST])}{more}"
        return text

    def write(self, out: Path, limit: int) -> int:
        """Writes the archive; returns its bytes. Raises UserError if it is larger than `limit` bytes, or a file cannot be read."""
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in self.files:
                self._add(archive, name, limit)
        size = out.stat().st_size
        if size > limit:
            raise self._too_large(limit)
        return size

    def _add(self, archive: zipfile.ZipFile, name: str, limit: int) -> None:
        path = self.root / name
        try:
            info = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
            info.date_time, info.compress_type = _EPOCH, zipfile.ZIP_DEFLATED
            with path.open("rb") as source, archive.open(info, "w") as sink:
                while chunk := source.read(_CHUNK):
                    sink.write(chunk)
                    if archive.fp is not None and archive.fp.tell() > limit:
                        raise self._too_large(limit)
        except (OSError, UnicodeEncodeError) as error:
            raise UserError(
                f"{path}: cannot be shipped: {getattr(error, 'strerror', None) or error}",
                "change its permissions or its name, or add it to .rayignore",
            ) from None

    def _too_large(self, limit: int) -> UserError:
        return UserError(
            f"{self.root}: {len(self.files)} files, {mib(self.size)}, make a package of more than {mib(limit)}, which a cluster "
            f"does not accept; the largest: {self.largest()}",
            "add files that the job does not need to .gitignore or .rayignore, or give a smaller --working-dir; for large data use "
            "a location that the nodes can read: an absolute path on shared storage, or a URI",
        )


def mib(size: int) -> str:
    """Bytes as text: in KiB below 1 MiB, else in MiB."""
    return f"{size / (1 << 10):.1f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB"


def select(root: Path, storages: Sequence[str] = (), needed: Sequence[str] = ()) -> Package:
    """The files of `root` to ship. Raises UserError if a folder cannot be read.

    `storages`: folders or URIs that hold runs. `needed`: files and folders in `root` that the job names; they are always shipped.
    """
    from raydist.cluster.ray_private import get_runtime_env_default_excludes

    root = root.resolve()
    walk = _Walk(root, frozenset(get_runtime_env_default_excludes()), frozenset(map(_local, storages)), _listed(root))
    files = dict(walk.files(root))
    for name in map(os.path.normpath, needed):
        path = root / name
        if path.is_dir():
            named = _Walk(root, walk.never, frozenset(), None, ignoring=False)
            files |= named.files(path)
            walk.left_out |= named.left_out
        elif path.is_file():
            files[name] = path.stat().st_size
    left_out = {
        name: what
        for name, what in walk.left_out.items()
        if name not in files and not any(file.startswith(f"{name}/") for file in files)
    }
    return Package(root, dict(sorted(files.items())), left_out)


class _Walk:
    """One pass over a folder. `listed`: files that git tracks or would track, and folders that it does not enter (submodules);
    None if git cannot list them. The pass fills `left_out`."""

    def __init__(
        self,
        root: Path,
        never: frozenset[str],
        storages: frozenset[Path | None],
        listed: frozenset[str] | None,
        *,
        ignoring: bool = True,
    ) -> None:
        self.root, self.never, self.storages, self.ignoring = root, never, storages, ignoring
        self.listed = listed
        self.above = None if listed is None else frozenset(p.as_posix() for n in listed for p in Path(n).parents)
        self.left_out: dict[str, str] = {}

    def files(self, folder: Path) -> Iterator[tuple[str, int]]:
        """Name and bytes of each file to ship."""
        yield from self._inside(folder, [], [folder.resolve()], by_git=self.listed is not None)

    def _inside(
        self, folder: Path, rules: Sequence[Callable[[Path], bool]], above: list[Path], by_git: bool
    ) -> Iterator[tuple[str, int]]:
        try:
            entries = sorted(os.scandir(folder), key=lambda e: e.name)
        except OSError as error:
            raise UserError(
                f"{folder}: cannot be read: {error.strerror}", "add it to .gitignore or .rayignore"
            ) from None
        if self.ignoring:
            rules = [*rules, *_rules(folder, gitignore=not by_git)]
        for entry in entries:
            path = Path(entry.path)
            name = path.relative_to(self.root).as_posix()
            if entry.name in self.never or any(rule(path) for rule in rules):
                continue
            inner = os.path.isdir(path)  # False for a link that goes round in a circle, for which entry.is_dir() raises
            real = Path(os.path.realpath(path)) if inner or entry.is_symlink() else path
            if what := _secret(name, real, inner):
                self.left_out[name] = what
                continue
            # A job may name a folder of links to data elsewhere: all of that is shipped.
            out = self.ignoring and entry.is_symlink() and not real.is_relative_to(self.root)
            if inner:
                # A submodule, another repository or a symlink to a folder: git lists it, and does not enter it.
                other = by_git and self.listed is not None and name in self.listed
                known = not by_git or other or (self.above is not None and name in self.above)
                if known and real not in above and not self._own(path, name):
                    if out:
                        self.left_out[name] = _OUT
                    else:
                        yield from self._inside(path, rules, [*above, real], by_git and not other)
            elif os.path.isfile(path) and (not by_git or (self.listed is not None and name in self.listed)):
                if out:
                    self.left_out[name] = _OUT
                else:
                    yield name, entry.stat().st_size

    def _own(self, path: Path, name: str) -> bool:
        """Whether no job needs this folder: a virtual environment, a cache, or output of raydist (which goes into `left_out`)."""
        if (path / "pyvenv.cfg").is_file() or (path / "CACHEDIR.TAG").is_file():
            return True
        if not self.ignoring:
            return False
        if what := "a storage of runs" if path.resolve() in self.storages else made_by_raydist(path):
            self.left_out[name] = what
        return bool(what)


def _secret(name: str, real: Path, folder: bool) -> str:
    """Kind of secrets of that name, or where a link of that name leads; "" for anything else."""
    names = _SECRET_FOLDERS if folder else _SECRETS
    if any(names.fullmatch(each) for each in ((name, real.as_posix()) if folder else (Path(name).name, real.name))):
        return "a folder of secrets" if folder else "a file of secrets"
    return ""


def made_by_raydist(folder: Path) -> str:
    """Kind of raydist output in that folder: "a run", "a sweep" or "prepared data"; "" for any other folder."""
    there = set(os.listdir(folder)) if os.access(folder, os.R_OK | os.X_OK) else set()
    if SPEC in there and there & {STATE, EVENTS, ATTEMPTS}:
        return "a run"
    if {SWEEP, CELLS} <= there:
        return "a sweep"
    if ".prepare" in there or ("index.json" in there and any(name.endswith(".arrow") for name in there)):
        return "prepared data"
    return ""


def _local(storage: str) -> Path | None:
    return None if "://" in storage else local_path(storage).resolve()


def _listed(root: Path) -> frozenset[str] | None:
    """Tracked and unignored files under `root`; None outside a work tree, without git, or in a folder that git ignores."""
    git = shutil.which("git")
    if git is None:
        return None
    if (
        subprocess.run([git, "-C", str(root), "check-ignore", "-q", "."], capture_output=True, check=False).returncode
        == 0
    ):
        return None
    command = [git, "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode != 0:
        return None
    return frozenset(os.fsdecode(name).rstrip("/") for name in done.stdout.split(b"\0") if name)


def _rules(folder: Path, gitignore: bool) -> list[Callable[[Path], bool]]:
    from raydist.cluster.ray_private import get_excludes_from_ignore_files

    logger = logging.getLogger("raydist.package")
    logger.setLevel(logging.WARNING)
    return list(get_excludes_from_ignore_files(folder, include_gitignore=gitignore, logger=logger))
