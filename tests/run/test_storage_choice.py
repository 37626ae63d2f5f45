"""Where runs are stored: the order of sources, and which folders `runs` count."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydist.errors import RunNotFound, UserError
from raydist.run import directory, storage_choice, sweep_directory
from raydist.run.storage_choice import choose, config_file, holds_runs, others
from raydist.storage import Storage


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, HOME/work/deep, with a temporary HOME; no source chooses a storage yet."""
    for name in ("RAYDIST_STORAGE", "XDG_CONFIG_HOME", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    here = tmp_path / "work" / "deep"
    here.mkdir(parents=True)
    monkeypatch.chdir(here)
    return here


def stored(folder: Path, name: str = "a-run") -> Path:
    """Stores a run in the folder, and returns it."""
    Storage(folder).at(name).write("spec.yaml", b"")
    return folder


def configure(text: str) -> Path:
    """Writes the user's configuration file."""
    path = config_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_order(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the lowest priority to the highest, each source overrides those before, and the choice names it."""
    assert (choose().uri, choose().source) == ("~/raydist", "default")
    far = stored(tmp_path / "work" / "runs")
    assert (choose().uri, choose().source) == (str(far), "folder")
    near = stored(place / "runs")
    assert choose().uri == str(near)
    path = configure('storage = "/configured"\n')
    assert (choose().uri, choose().source) == ("/configured", "configuration")
    assert str(path) in choose().because
    monkeypatch.setenv("RAYDIST_STORAGE", "/from/environment")
    assert (choose().uri, choose().source) == ("/from/environment", "environment")
    assert (choose("/given").uri, choose("/given").source) == ("/given", "option")
    assert directory.default_storage() == "/from/environment"


@pytest.mark.parametrize(
    ("names", "counts"),
    [
        ([], False),
        (["x/readme.md", "spec.yaml"], False),
        ([".data/"], True),
        ([".tuned/"], True),
        (["x/spec.yaml"], True),
        (["x/cells.jsonl"], True),
    ],
)
def test_which_folders_count(place: Path, names: list[str], counts: bool) -> None:
    """A folder counts if it has a mark of raydist, a run or a sweep; another tool's `runs` does not count."""
    runs = place / "runs"
    runs.mkdir()
    for name in names:
        path = runs / name
        if name.endswith("/"):
            path.mkdir()
        else:
            path.parent.mkdir(exist_ok=True)
            path.touch()
    assert holds_runs(runs) is counts
    assert choose().source == ("folder" if counts else "default")


def test_the_names_are_those_of_runs_and_sweeps() -> None:
    """The marks are the names that all commands use for runs and sweeps."""
    assert storage_choice.FIRSTS == (directory.SPEC, sweep_directory.CELLS)
    assert storage_choice.MARKS == (directory.DATA, directory.TUNED)


def test_another_user_s_folder_does_not_count(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that belongs to another user does not count, so nobody else can choose where runs are stored."""
    stored(place / "runs")
    monkeypatch.setattr("os.geteuid", lambda: 4242)
    assert choose().source == "default"


def test_a_ray_job_looks_for_no_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder of a Ray job is a temporary copy, so its `runs` does not count; environment and configuration do."""
    stored(place / "runs")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert choose().uri == "~/raydist"
    configure('storage = "/configured"\n')
    assert choose().uri == "/configured"


def test_xdg_config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """XDG_CONFIG_HOME is used if it is absolute, as its specification says."""
    assert config_file() == tmp_path / ".config/raydist/config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert config_file() == tmp_path / ".config/raydist/config.toml"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    configure('storage = "s3://bucket/runs"')
    assert (tmp_path / "xdg/raydist/config.toml").is_file()
    assert choose().uri == "s3://bucket/runs"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("storage = /data", "not valid TOML", 'write storage = "/folder/or/uri"'),
        ('storge = "/data"', 'unknown key "storge"', 'did you mean "storage"?'),
        ("gpus = 3", 'unknown key "gpus"', "allowed: storage"),
        ("storage = 3", "storage: 3", "in quotes"),
        ('storage = ""', "storage: ''", "in quotes"),
    ],
)
def test_a_bad_configuration_file(text: str, message: str, hint: str) -> None:
    """One error names the file, what is wrong and what to write, with exit code 2. With an option the file is not read."""
    path = configure(text)
    with pytest.raises(UserError) as caught:
        choose()
    assert caught.value.message.startswith(f"{path}: ")
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2
    assert choose("/given").uri == "/given"


def test_other_places_with_runs(place: Path, tmp_path: Path) -> None:
    """The nearest folder `runs` and ~/raydist, if they hold runs and were not chosen."""
    assert others(choose()) == []
    runs, default = stored(place / "runs"), stored(tmp_path / "raydist")
    assert others(choose()) == [str(default)]
    assert others(choose("~/raydist")) == [str(runs)]
    assert others(choose("s3://bucket/runs")) == [str(runs), str(default)]


def test_what_is_not_found_says_where_it_was_looked_for(place: Path, tmp_path: Path) -> None:
    """The error has the place and why it was chosen, similar names, existing runs and other places, for runs and for sweeps; a
    sweep is not taken for a run."""
    stored(place / "runs", "quickstart")
    stored(tmp_path / "raydist")
    with pytest.raises(RunNotFound) as caught:
        directory.resolve("quikstart")
    assert caught.value.message == (
        f"no run 'quikstart': looked at {place}/runs/quikstart (the nearest folder 'runs' with raydist's runs)"
    )
    assert caught.value.hint.splitlines()[:2] == ["did you mean 'quickstart'?", "  runs there: quickstart"]
    assert f"there are runs in {tmp_path}/raydist" in caught.value.hint
    assert "look elsewhere with --storage, RAYDIST_STORAGE, or storage" in caught.value.hint
    Storage(place / "runs").at("lr-batch").write("cells.jsonl", b"")
    with pytest.raises(RunNotFound, match="'lr-batch' is a sweep"):
        directory.resolve("lr-batch")
    with pytest.raises(RunNotFound, match="the nearest folder 'runs'") as caught:
        sweep_directory.resolve_sweep("lr-bach")
    assert "did you mean 'lr-batch'?" in caught.value.hint


class Crowded(Storage):
    """A storage with ten thousand runs, and a folder that is none."""

    def folders(self, folder: str = "") -> list[str]:
        return [f"run-{number:04d}" for number in range(10_000)] + ["samples", ".hidden"]


@pytest.mark.parametrize(("there", "most"), [(True, 14), (False, 60)])
def test_a_misspelt_name_among_ten_thousand_runs(tmp_path: Path, there: bool, most: int) -> None:
    """A bounded number of folders is looked at, because each takes a request to an object store: similar names, and some others."""
    looked: list[str] = []

    def look(folder: str) -> bool:
        looked.append(folder)
        return there and folder != "samples"

    known = directory.existing(Crowded(tmp_path), "run-77777", look)
    assert len(looked) == len(set(looked)) == most
    assert "run-7777" in looked
    assert set(known) <= set(looked)
    error = directory.not_found("run", "run-77777", [str(tmp_path)], known, "")
    assert error.hint.startswith("did you mean 'run-7777'" if there else "")
    assert error.hint.endswith(", run-0009, ..." if there else "")
