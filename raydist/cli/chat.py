"""A conversation with a trained model, by the chat template of its data.

Runs in: the user's shell, in one process without Ray. Imports torch inside functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raydist.data.chat_template import prompt, render
from raydist.data.conversations import Conversations
from raydist.errors import UserError

if TYPE_CHECKING:
    import torch

    from raydist.data.dataset import TokenDataset


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
        made: torch.Tensor = self._model.generate(torch.tensor([asked]), min(self._tokens, room), end=end, **self._draw)
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


def lines() -> Iterator[str]:
    """The messages that a user types, or that another program writes: one a line, empty ones left out."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
