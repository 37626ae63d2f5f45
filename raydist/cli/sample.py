"""`raydist sample`: generates text from a run's checkpoint, by default the newest, or from an exported folder.

Runs in: the user's shell, in one process without Ray. Imports torch inside the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from raydist.cli import options
from raydist.errors import UserError
from raydist.run.directory import resolve


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(sample)


def sample(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run's name, folder or URI; or an exported folder.", show_default=False),
    ],
    storage: options.Storage = None,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Sample from this many most likely tokens.")] = 50,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step; default: the newest.")] = None,
) -> None:
    """Print text that a trained model generates."""
    exported = (Path(run) / "config.json").exists()
    folder = None if exported else resolve(run, storage)
    import torch

    from raydist.worker import saved_model

    saved = saved_model.of_folder(Path(run)) if folder is None else saved_model.of_run(folder, step)[0]
    model: Any = saved.module
    if not hasattr(model, "generate"):
        raise UserError(f'model "{saved.spec.name}" cannot generate text', "give it generate(tokens_BT, max_new, ...)")
    ids = saved.tokenizer.encode([prompt])[0]
    tokens_BT = torch.tensor([list(map(int, ids)) or [saved.end]])
    generator = torch.Generator().manual_seed(seed)
    output_BT = model.generate(tokens_BT, tokens, temperature=temperature, top_k=top_k, generator=generator)
    print(saved.tokenizer.decode(output_BT[0].tolist()))
