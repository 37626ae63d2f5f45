"""Chat templates: messages -> text, and the spans of it that an assistant wrote. Jinja in its sandbox, as in `transformers`.

Runs anywhere. `jinja2` is imported when a template is compiled. A template can neither change what it gets nor reach anything else.

A template with `{% generation %}` says itself what the assistant wrote. Of another one an assistant's turn is what it adds to the
prompt before it: from the end of the generation prompt to the next message, so with the token that ends the turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any, Literal, NoReturn

from raydist.errors import DataError
from raydist.parsing import JOB_BYTES, parse_json, read_text
from raydist.paths import local_path
from raydist.registry import did_you_mean
from raydist.storage import Storage

Message = Mapping[str, Any]
Span = tuple[int, int]
"""[start, end) of characters."""
LossOn = Literal["completions", "all"]
TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
"""Files beside a tokenizer.json that may have its template, the first one first."""
OPEN, CLOSE = "\ue000", "\ue001"
"""Marks of what a `generation` block has made: private characters, which messages may not contain."""

BUILT_IN = {
    "chatml": (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|im_end|>\n{% endgeneration %}"
        "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|eot_id|>{% endgeneration %}"
        "{% else %}{{ message.content }}<|eot_id|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{{ message.role }}:\n"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}\n\n{% endgeneration %}"
        "{% else %}{{ message.content }}\n\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    ),
}
"""The templates that `data.chat_template` names: Qwen's, Llama 3's, and one without special tokens."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How conversations become text. `template`: None is enough for `prompt` and `completion`. `tokens`: the special tokens that a
    template may name (bos_token, ...). `loss_on`: what is trained."""

    template: str | None = None
    tokens: dict[str, str] = field(default_factory=dict)
    loss_on: LossOn = "completions"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text. `spans`: what counts in the loss, in order; `special`: whether the text may spell special tokens,
    because a template wrote it."""

    text: str
    spans: tuple[Span, ...]
    special: bool

    @property
    def to_the_end(self) -> bool:
        """Whether the last token of the text counts."""
        return bool(self.spans) and self.spans[-1][1] == len(self.text)


def chat_format(template: str | None, tokenizer: str, loss_on: LossOn) -> ChatFormat:
    """The format that a job asks for. Raises DataError.

    `template`: a built-in one, the path of a file, or None: the one beside `tokenizer`, if that is a tokenizer.json.
    """
    folder = Storage(tokenizer).above() if tokenizer.partition("?")[0].endswith("tokenizer.json") else None
    config = _config(folder) if folder is not None else {}
    tokens = {k: text for k, v in config.items() if k.endswith("_token") and (text := _token(v)) is not None}
    if template is None:
        found = _own(folder, config) if folder is not None else None
    elif template in BUILT_IN:
        found = BUILT_IN[template]
    else:
        try:
            found = read_text(local_path(template), JOB_BYTES)
        except (OSError, ValueError) as error:
            near = did_you_mean(template, list(BUILT_IN))
            raise DataError(
                f"chat template {template!r}: cannot be read: {getattr(error, 'strerror', None) or error}",
                f"{near}, or the path of a template",
            ) from None
    if found is not None:
        _compiled(found)
    return ChatFormat(found, tokens, loss_on)


def _config(folder: Storage) -> dict[str, Any]:
    try:
        read = parse_json(folder.read(CONFIG))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise DataError(f"{folder.uri}/{CONFIG}: is not JSON: {error}", "download it again") from None
    return read if isinstance(read, dict) else {}


def _token(value: Any) -> str | None:
    """A special token in tokenizer_config.json: its text, or a dict that has it."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _own(folder: Storage, config: Mapping[str, Any]) -> str | None:
    """The template of a tokenizer's folder; of several named ones the default."""
    with suppress(FileNotFoundError):
        return folder.read(TEMPLATE).decode()
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}.get("default")
    return found if isinstance(found, str) else None


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """The template of this text. Raises DataError."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}`: marks what an assistant wrote."""

        tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Callable[[], str]) -> str:
            return OPEN + caller() + CLOSE

    def fail(message: str) -> NoReturn:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)  # Jinja's own escapes HTML

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = fail
    try:
        return environment.from_string(template)
    except jinja2.exceptions.TemplateSyntaxError as error:
        raise DataError(
            f"the chat template is not valid: line {error.lineno}: {error.message}",
            "give another one with data.chat_template (--chat-template)",
        ) from None


def prompt(format: ChatFormat, messages: Sequence[Message], where: str = "") -> str:
    """The text after which the assistant answers. Raises DataError."""
    return _render(format, messages, {}, lambda: where, ask=True).replace(OPEN, "").replace(CLOSE, "")


def render(
    format: ChatFormat,
    messages: Sequence[Message],
    where: Callable[[], str],
    *,
    first: int = 0,
    more: Mapping[str, Any] | None = None,
) -> Rendered:
    """A conversation as text, and what of it counts: the turns of the assistant from message `first` on, or all.

    `where`: the place of the conversation, for errors. `more`: other values for the template. Raises DataError.
    """
    whole = _render(format, messages, more or {}, where)
    text, marked = _without_marks(whole)
    if format.loss_on == "all":
        return Rendered(text, ((0, len(text)),), special=True)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not marked:
        marked = [_turn(format, messages, i, text, more or {}, where) for i in turns if i >= first]
    elif first:
        marked = marked[sum(i < first for i in turns) :]
    if not (spans := tuple(span for span in marked if span[0] < span[1])):
        raise DataError(
            f"{where()}: the chat template writes nothing for the assistant's messages", "check data.chat_template"
        )
    return Rendered(text, spans, special=True)


def _render(
    format: ChatFormat,
    messages: Sequence[Message],
    more: Mapping[str, Any],
    where: Callable[[], str],
    *,
    ask: bool = False,
) -> str:
    if format.template is None:
        raise DataError(
            f"{where()}: messages need a chat template, and the tokenizer has none",
            f"set data.chat_template (--chat-template) to {', '.join(BUILT_IN)}, or to the path of one",
        )
    values = {**format.tokens, **more, "messages": messages, "add_generation_prompt": ask}
    try:
        return str(_compiled(format.template).render(**values))
    except DataError:
        raise
    except Exception as error:  # the template's own: Jinja's errors, and Python's of its expressions
        what = str(error) or type(error).__name__
        raise DataError(
            f"{where()}: the chat template fails: {what}", "change the messages, or the template (data.chat_template)"
        ) from None


def _without_marks(whole: str) -> tuple[str, list[Span]]:
    """The text, and the spans between marks."""
    spans: list[Span] = []
    text = ""
    for i, part in enumerate(whole.split(OPEN)):
        inside, _, after = part.partition(CLOSE) if i else ("", "", part)
        if i:
            spans.append((len(text), len(text) + len(inside)))
        text += inside + after
    return text, spans


def _turn(
    format: ChatFormat,
    messages: Sequence[Message],
    i: int,
    text: str,
    more: Mapping[str, Any],
    where: Callable[[], str],
) -> Span:
    """What message `i` adds to the prompt before it. Raises DataError if that cannot be determined."""
    before = _render(format, messages[:i], more, where, ask=True)
    through = _render(format, messages[: i + 1], more, where)
    if text.startswith(before) and through.startswith(before):
        if text.startswith(through):
            return len(before), len(through)
        # The last answer is written in another way than earlier ones (with its thoughts): what ends it is the same.
        content = str(messages[i].get("content") or "").strip()
        ends = through[through.rfind(content) + len(content) :] if content and content in through else ""
        at = text.find(content + ends, len(before)) if ends else -1
        if at >= 0:
            return len(before), at + len(content + ends)
    raise DataError(
        f"{where()}: messages[{i}]: the chat template writes a turn in another way when others follow, so the assistant's part is "
        "not known",
        "put {% generation %} and {% endgeneration %} around it in the template, or set data.loss_on: all",
    )
