"""`raydist sample`: generates text from a run's checkpoint, by default the newest, or from exported weights.

Runs in: the user's shell, in one process without Ray. Imports torch inside the command.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from raydist.cli import options
from raydist.errors import UsageError
from raydist.printable import printable
from raydist.run.directory import SPEC, resolve


def sample(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="A run folder's path or URI, or a run's name; or a folder that `raydist checkpoint export` wrote.",
            show_default=False,
        ),
    ],
    storage: options.Storage = None,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, help="Tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, max=1e6, help="0: always the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many most likely tokens.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=(1 << 63) - 1, help="The same seed gives the same text.")] = 0,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; default: the newest.")] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Answer messages, by the chat template of the data: one a line of the terminal."),
    ] = False,
    message: Annotated[
        list[str] | None,
        typer.Option(
            help="With --chat: answer this message and end; several are answered in turn.", show_default=False
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="With --chat: the message of the system.", show_default=False)
    ] = None,
    trust: options.Trust = False,
) -> None:
    """Print text that a trained model generates, or chat with it."""
    if not chat and (message or system):
        raise UsageError("--message and --system: need --chat", "add --chat, or give the text with --prompt")
    from raydist import registry
    from raydist.worker import sampling

    if Path(run, "config.json").is_file() and not Path(run, SPEC).exists():
        made = sampling.of_folder(Path(run))
    else:
        folder = resolve(run, storage)
        registry.trust(trust)
        made = sampling.of_run(folder, step)
    if not chat:
        print(printable(made.text(prompt, tokens, temperature, top_k, seed)))
        return
    conversation = made.chat(tokens, temperature, top_k, seed, system)
    for text in message or _lines():
        conversation.add("user", text)
        print(printable(conversation.answer()), flush=True)


def _lines() -> Iterator[str]:
    """The messages that a user types, or that another program writes: one a line, empty ones left out."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
