"""`raydist evaluate`: the held-out loss of exported weights.

Runs in: the user's shell, in one process without Ray. Imports torch inside the command.
"""

from __future__ import annotations

import json
from typing import Annotated

import typer

from raydist.cli import options


def evaluate(
    folder: Annotated[
        str,
        typer.Argument(metavar="FOLDER", help="What `raydist checkpoint export` wrote; int8, too.", show_default=False),
    ],
    data: Annotated[
        str,
        typer.Option(help="A dataset that `raydist data prepare` made, with the same tokenizer.", show_default=False),
    ],
    context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a sequence; default: the config's longest.", show_default=False)
    ] = None,
    batches: Annotated[int, typer.Option(min=1, help="Batches of held-out sequences.")] = 8,
    sequences: Annotated[int, typer.Option(min=1, help="Sequences of a batch.")] = 8,
    trust: options.TrustData = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value on stdout.")] = False,
) -> None:
    """Print the loss of exported weights on held-out text, and the speed of the passes."""
    from raydist.api import evaluating

    found = evaluating.evaluate.here(folder, data, context=context, batches=batches, sequences=sequences, trust=trust)
    if as_json:
        print(json.dumps(found))
        return
    print(
        f"eval loss {found['loss']:.4f} nats per token over {found['tokens']:,} tokens; {found['tokens_per_second']:,.0f} tokens/s"
    )
