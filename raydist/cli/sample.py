"""`raydist sample`: generates text from a run's checkpoint, by default the newest, or from exported weights.

Runs in: the user's shell, in one process without Ray. Imports torch inside the command.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from raydist.cli import options
from raydist.cli.chat import Chat, lines
from raydist.errors import UsageError, UserError
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
    if Path(run, "config.json").is_file() and not Path(run, SPEC).exists():
        if chat:
            raise UsageError(
                "--chat: needs a run, not exported weights", "transformers chats with these; or name the run"
            )
        from raydist.worker.exported import open_folder

        exported = open_folder(Path(run))
        tokenizer = exported.tokenizer()
        _print(exported.model, tokenizer, tokenizer.end, prompt, tokens, temperature, top_k, seed)
        return
    folder = resolve(run, storage)

    from raydist import registry
    from raydist.worker.checkpoint.restored_model import newest_model

    registry.trust(trust)
    made, dataset, spec = newest_model(folder, step)
    model: Any = made
    if not hasattr(model, "generate"):
        raise UserError(f'model "{spec.model.name}" cannot generate text', "give it generate(tokens_BT, max_new, ...)")
    if chat:
        import torch

        draw = {"temperature": temperature, "top_k": top_k, "generator": torch.Generator().manual_seed(seed)}
        conversation = Chat(model, dataset, spec.model.context, tokens, draw)
        if system is not None:
            conversation.add("system", system)
        for text in message or lines():
            conversation.add("user", text)
            print(printable(conversation.answer()), flush=True)
        return
    _print(model, dataset.tokenizer, dataset.end, prompt, tokens, temperature, top_k, seed)


def _print(
    model: Any, tokenizer: Any, end: int, prompt: str, tokens: int, temperature: float, top_k: int, seed: int
) -> None:
    """Prints the prompt and what the model generates after it. `end`: what an empty prompt begins with."""
    import torch

    ids = tokenizer.encode([prompt])[0]
    tokens_BT = torch.tensor([list(map(int, ids)) or [end]])
    generator = torch.Generator().manual_seed(seed)
    output_BT = model.generate(tokens_BT, tokens, temperature=temperature, top_k=top_k, generator=generator)
    print(printable(tokenizer.decode(output_BT[0].tolist())))
