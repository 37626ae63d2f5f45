"""Text that a trained model generates, and conversations with it by the chat template of its data.

Runs in: `raydist sample` and `Run.sample`, without Ray. Imports torch inside functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydist.data.chat_template import prompt, render
from raydist.data.conversations import Conversations
from raydist.errors import UsageError, UserError

if TYPE_CHECKING:
    from raydist.data.dataset import TokenDataset
    from raydist.run.directory import RunDir


class Chat:
    """The messages so far, and the model that answers. `draw`: arguments of the model's `generate`.

    Raises UserError if the data that it was trained on has no chat template.
    """

    def __init__(self, model: Any, dataset: TokenDataset, context: int, tokens: int, draw: dict[str, Any]) -> None:
        if dataset.index.chat is None or dataset.index.chat.template is None:
            raise UserError(
                f"{dataset.uri}: has no chat template, so the model was not trained to chat",
                "leave out --chat, and give the text to continue with --prompt",
            )
        self.messages: list[dict[str, Any]] = []
        self._model, self._tokenizer, self._end = model, dataset.tokenizer, dataset.end
        self._format, self._context, self._tokens, self._draw = dataset.index.chat, context, tokens, draw
        self._rows = Conversations(self._format, getattr(self._tokenizer, "special", ()))
        self._stop = self._after_an_answer()

    def add(self, role: str, text: str) -> None:
        """Adds a message. Raises DataError for one that may not be trained on either."""
        self.messages.append(self._rows.message({"role": role, "content": text}, lambda: "--chat", "message"))

    def answer(self) -> str:
        """What the model says next, which is added to the messages. Raises UserError if it has no room for it."""
        import torch

        asked = self._ids(prompt(self._format, self.messages, "--chat"))
        room = self._context - len(asked)
        if room < 1:
            raise UserError(
                f"the conversation has {len(asked)} tokens, and model.context is {self._context}", "start a new one"
            )
        end = self._stop[0] if self._stop else self._end
        made: Any = self._model.generate(torch.tensor([asked]), min(self._tokens, room), end=end, **self._draw)
        said = made[0, len(asked) :].tolist()
        stops = [i for i, token in enumerate(said) if token in (end, self._end)]
        text = self._tokenizer.decode(said[: stops[0]] if stops else said)
        for ending in self._endings if not self._stop else ():
            text = text.partition(ending)[0]
        text = text.strip()
        self.messages.append({"role": "assistant", "content": text})
        return text

    def _ids(self, text: str) -> list[int]:
        """The tokens of a text that the template wrote."""
        with_starts = getattr(self._tokenizer, "encode_with_starts", None)
        return [int(i) for i in (with_starts([text], True)[0][0] if with_starts else self._tokenizer.encode([text])[0])]

    def _after_an_answer(self) -> list[int]:
        """The special token that the template writes after an answer, if it writes one."""
        content = "answer"
        talk = [{"role": "user", "content": "question"}, {"role": "assistant", "content": content}]
        text = render(self._format, talk, lambda: "--chat").text
        tail = text[text.rfind(content) + len(content) :]
        special = getattr(self._tokenizer, "special", ())
        first = next((token for token in special if tail.lstrip().startswith(token)), None)
        # Without such a token: the text after an answer, or that between it and the user's next message.
        text = render(self._format, [*talk, talk[0]], lambda: "--chat").text
        between = text[text.rfind(content) + len(content) : text.rfind("question")]
        self._endings = [ending for ending in (tail.strip(), between.rstrip()) if ending]
        return self._ids(first) if first is not None else []


@dataclass(frozen=True, slots=True)
class Sampler:
    """A trained model that generates text. `end`: the token that an empty prompt begins with; `dataset`: None of exported weights,
    which have no chat template."""

    model: Any
    tokenizer: Any
    end: int
    dataset: TokenDataset | None
    context: int

    def text(self, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
        """The prompt, and what the model generates after it: `tokens` tokens, each drawn from the `top_k` most likely ones."""
        import torch

        ids = self.tokenizer.encode([prompt])[0]
        tokens_BT = torch.tensor([list(map(int, ids)) or [self.end]])
        output_BT = self.model.generate(tokens_BT, tokens, **_draw(temperature, top_k, seed))
        return str(self.tokenizer.decode(output_BT[0].tolist()))

    def chat(self, tokens: int, temperature: float, top_k: int, seed: int, system: str | None = None) -> Chat:
        """A new conversation. `tokens`: of an answer, at most; `system`: the message of the system. Raises UserError if the model
        was not trained to chat."""
        if self.dataset is None:
            raise UsageError(
                "--chat: needs a run, not exported weights", "transformers chats with these; or name the run"
            )
        made = Chat(self.model, self.dataset, self.context, tokens, _draw(temperature, top_k, seed))
        if system is not None:
            made.add("system", system)
        return made


def of_run(run: RunDir, step: int | None) -> Sampler:
    """Of a run's checkpoint, by default the newest. Raises CheckpointNotFound, and UserError for a model that generates no text."""
    from raydist.worker.checkpoint.restored_model import newest_model

    made, dataset, spec = newest_model(run, step)
    if not hasattr(made, "generate"):
        raise UserError(f'model "{spec.model.name}" cannot generate text', "give it generate(tokens_BT, max_new, ...)")
    return Sampler(made, dataset.tokenizer, dataset.end, dataset, spec.model.context)


def of_folder(folder: Path) -> Sampler:
    """Of a folder that `Run.export` wrote."""
    from raydist.worker.exported import open_folder

    exported = open_folder(folder)
    tokenizer = exported.tokenizer()
    return Sampler(exported.model, tokenizer, tokenizer.end, None, exported.spec.context)


def _draw(temperature: float, top_k: int, seed: int) -> dict[str, Any]:
    import torch

    return {"temperature": temperature, "top_k": top_k, "generator": torch.Generator().manual_seed(seed)}
