"""Rows with `messages`, or with `prompt` and `completion`, checked and made text.

Runs anywhere: in the preparing process, and in Ray Data's tasks.

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "completion": "..."}          two texts: no template is applied
    {"prompt": [message, ...], "completion": [message, ...]}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raydist.data.chat_template import CLOSE, OPEN, ChatFormat, Rendered, render
from raydist.errors import DataError
from raydist.registry import did_you_mean

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGES, PAIR = ("messages",), ("prompt", "completion")
_FIELDS = "messages, or prompt and completion"
Where = Callable[[], str]
"""The place of a row, computed for an error only."""


class Conversations:
    """Rows -> texts. `special`: the special tokens of the tokenizer, which only a template may write."""

    def __init__(self, format: ChatFormat, special: Sequence[str] = ()) -> None:
        self._format, self._special = format, tuple(special)

    def read(self, row: Any, where: Where) -> Rendered:
        """The text of a row. Raises DataError, which names the place and the field."""
        names = schema_of(row, where)
        more = {"tools": row["tools"]} if isinstance(row.get("tools"), list) and row["tools"] else {}
        self._check(more.get("tools"), where, "tools")
        if names == MESSAGES:
            messages = self._messages(row["messages"], where, "messages")
            if all(m["role"] != "assistant" for m in messages):
                raise DataError(
                    f"{where()}: messages: none is of the assistant, so there is nothing to train on",
                    'add one with "role": "assistant"',
                )
            return render(self._format, messages, where, more=more)
        before, after = row["prompt"], row["completion"]
        if isinstance(before, str) and isinstance(after, str):
            return self._pair(before, after, where)
        if isinstance(before, list) and isinstance(after, list):
            prompt = self._messages(before, where, "prompt")
            completion = self._messages(after, where, "completion")
            for i, message in enumerate(completion):
                if message["role"] != "assistant":
                    raise DataError(
                        f"{where()}: completion[{i}].role: {message['role']!r} is not the assistant",
                        "move it into prompt",
                    )
            return render(self._format, [*prompt, *completion], where, first=len(prompt), more=more)
        raise DataError(
            f"{where()}: prompt has type {type(before).__name__}, completion {type(after).__name__}",
            "give two texts, or two lists of messages",
        )

    def _pair(self, before: str, after: str, where: Where) -> Rendered:
        if not after.strip():
            raise DataError(f"{where()}: completion: is empty", "leave the row out, or give the text to learn")
        check_text(before, where, "prompt")
        check_text(after, where, "completion")
        start = 0 if self._format.loss_on == "all" else len(before)
        return Rendered(before + after, ((start, len(before + after)),), special=False)

    def _messages(self, given: Any, where: Where, name: str) -> list[dict[str, Any]]:
        if not isinstance(given, list) or not given:
            what = "is empty" if given == [] else f"has type {type(given).__name__}"
            raise DataError(f"{where()}: {name}: {what}", 'give a list of {"role": ..., "content": ...}')
        return [self.message(each, where, f"{name}[{i}]") for i, each in enumerate(given)]

    def message(self, given: Any, where: Where, name: str) -> dict[str, Any]:
        """A message without nulls. Raises DataError, which names the place and the field."""
        if not isinstance(given, Mapping):
            raise DataError(f"{where()}: {name}: has type {type(given).__name__}", 'give {"role": ..., "content": ...}')
        message = {key: value for key, value in given.items() if value is not None}  # Parquet fills in nulls
        role, content = message.get("role"), message.get("content")
        if role is None:
            raise DataError(f"{where()}: {name}: has no role", f"give one of {', '.join(ROLES)}")
        if role not in ROLES:
            raise DataError(f"{where()}: {name}.role: unknown {role!r}", did_you_mean(str(role), list(ROLES)))
        calls = bool(message.get("tool_calls"))
        if content is None and not calls:
            raise DataError(f"{where()}: {name}: has no content", "give the text of the message")
        if content is not None and not isinstance(content, str):
            raise DataError(f"{where()}: {name}.content: has type {type(content).__name__}", "only text is trained on")
        if role == "assistant" and not calls and not (content or "").strip():
            raise DataError(f"{where()}: {name}.content: is empty", "leave the message out, or give the text to learn")
        self._check(message, where, name)
        return message

    def _check(self, value: Any, where: Where, name: str) -> None:
        """Raises DataError for a text, also of a tool or of its call, that could be taken for what the template writes."""
        if isinstance(value, str):
            check_text(value, where, name)
            for token in self._special:
                if token in value:
                    raise DataError(
                        f"{where()}: {name}: spells the special token {token}, which only the chat template writes",
                        "remove it; a text that is rendered already can be trained on with data.format: text",
                    )
        elif isinstance(value, Mapping):
            for key, inner in value.items():
                self._check(key, where, name)
                self._check(inner, where, f"{name}.{key}")
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                self._check(inner, where, f"{name}[{i}]")


def schema_of(row: Any, where: Where) -> tuple[str, ...]:
    """The fields of a row that make its conversation: MESSAGES or PAIR. Raises DataError."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where()}: {type(row).__name__}, not a row with fields", f"give {_FIELDS}")
    has_messages, has_pair = row.get("messages") is not None, all(row.get(name) is not None for name in PAIR)
    if has_messages and has_pair:
        raise DataError(f"{where()}: has messages, and prompt and completion too", "leave one of them")
    if has_messages or has_pair:
        return MESSAGES if has_messages else PAIR
    there = ", ".join(f"{key} (null)" if value is None else str(key) for key, value in row.items()) or "no fields"
    raise DataError(f"{where()}: no conversation: it has {there}", f"give {_FIELDS}")


def check_schema(first: tuple[str, ...], first_where: Where, row: Any, where: Where) -> None:
    """Raises DataError if a row has another schema than the first one of its file."""
    if (found := schema_of(row, where)) != first:
        raise DataError(
            f"{where()}: has {' and '.join(found)}, and {first_where()} has {' and '.join(first)}",
            "put rows of one kind into a file",
        )


def check_text(text: str, where: Where, name: str) -> None:
    """Raises DataError for what is no text, or would be taken for a mark of a template."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where()}: {name}: {error.reason}", "a lone surrogate is not text: clean the data") from None
    if OPEN in text or CLOSE in text:
        raise DataError(f"{where()}: {name}: has the private character U+E000 or U+E001", "remove it")
