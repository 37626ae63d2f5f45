"""`raydist init`: writes the sample jobs and sweeps, for users who have the package and not the repository.

Runs in: the user's shell. The files are the repository's own jobs/, tune_sweeps/ and deploy/grafana/: raydist/starter contains
links to them, and a wheel contains the files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import raydist
from raydist.cli import output
from raydist.cli.schema import job_schema, sweep_schema
from raydist.errors import UserError
from raydist.parsing import JOB_BYTES, read_text

_STARTER = Path(raydist.__file__).parent / "starter"


def init(
    folder: Annotated[
        Path, typer.Argument(help="Target folder; created if missing.", show_default="the current folder")
    ] = Path("."),
) -> None:
    """Write sample jobs, sweeps, their schemas for editors, and the Grafana dashboard into a folder."""
    wanted = {f"schemas/{name}.schema.json": json.dumps(schema, indent=2) + "\n" for name, schema in
              (("spec", job_schema()), ("sweep-spec", sweep_schema()))}  # fmt: skip
    for path in sorted(path for path in _STARTER.glob("*/*") if path.is_file()):  # there may be a __pycache__
        text = path.read_text(encoding="utf-8")
        wanted[f"{path.parent.name}/{path.name}"] = text.replace("$schema=../docs/reference/", "$schema=../schemas/")
    missing = {name: text for name, text in wanted.items() if not _same(folder / name, text)}
    for name, text in missing.items():
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{(folder / name).parent}: cannot be created: {error.strerror}", "choose another folder"
            ) from None
        output.write(folder / name, text)
        print(folder / name)
    there = "" if folder == Path(".") else f"cd {folder} && "
    print(f"next: {there}raydist train jobs/quickstart.yaml")


def _same(path: Path, text: str) -> bool:
    """Whether the file exists with this text. Raises UserError if it exists with another text."""
    try:
        existing = read_text(path, JOB_BYTES)
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}", "choose another folder") from None
    if existing != text:
        raise UserError(
            f"{path} exists and differs from the sample: nothing was written", "move it away, or choose another folder"
        )
    return True
