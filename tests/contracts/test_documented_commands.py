"""Every raydist command in README and docs/ names sub-commands and options that exist. Nothing is run."""

from __future__ import annotations

import functools
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from raydist.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def commands(page: Path) -> list[str]:
    """The lines of its code blocks that call raydist, unchanged."""
    text = page.read_text(encoding="utf-8")
    fenced = "\n".join(re.findall(r"^```bash\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    lines = re.findall(r"^ {4}(raydist .*)$", text, re.MULTILINE) + re.findall(r"^(raydist .*)$", fenced, re.MULTILINE)
    return [re.split(r" {2,}|\s#", line)[0].strip() for line in lines]


@functools.cache
def whole() -> Any:
    """The command line, with all commands."""
    return typer.main.get_command(app)


def problems(command: str) -> list[str]:
    """Options that the sub-command does not have, or the sub-command if it does not exist."""
    words: list[str] = shlex.split(re.sub(r"\[(-[^\]]*)\]", r"\1", command).replace("...", ""))[1:]
    words = words[: words.index("--")] if "--" in words else words  # what follows is a script's own
    here = whole()
    while words and hasattr(here, "commands") and not words[0].startswith("-"):
        name = words[0].split("|")[0]
        if name not in here.commands:
            if here.name == "sweep":  # `raydist sweep FILE` is `raydist sweep run FILE`
                here = here.commands["run"]
                break
            return [f"no command {name!r}"]
        here, words = here.commands[name], words[1:]
    known = {"--help", "--version"} | {option for each in here.params for option in each.opts}
    asked = [word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return [option for option in asked if option not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_has_its_options(page: Path) -> None:
    """In README and every page of docs/."""
    wrong = {command: found for command in commands(page) if (found := problems(command))}
    assert wrong == {}


def test_an_option_that_is_not_there_is_found() -> None:
    """So are a wrong command and a wrong option of a sub-command."""
    assert problems("raydist train job.yaml --set a=1 --nosuch 3") == ["--nosuch"]
    assert problems("raydist sweep results NAME --nosuch") == ["--nosuch"]
    assert problems("raydist sweep FILE --dry-run") == []
    assert problems("raydist nosuch") == ["no command 'nosuch'"]
