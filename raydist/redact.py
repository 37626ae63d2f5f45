"""Removes secrets from texts: `s3://KEY:SECRET@bucket/x?token=T` -> `s3://bucket/x`, and values of secret variables.

Runs anywhere. Imports nothing of raydist.

The resulting URI opens with the credentials of the environment. A URI that was given with secrets is kept complete only in memory
(`Storage.full_uri`): the user's next command must contain it again. The value of a variable or option whose name says that it is
secret (HF_TOKEN, api_key) becomes `<secret>`; wherever the same value stands in a text of this process, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

T = TypeVar("T")

_END = r"\s\"<>"
# A password, also with a `/` or `@` that should be %2F or %40; a number is a port; a user name alone is not secret.
_PASSWORD = re.compile(
    rf"(?<=://)[^{_END}/?#@:\[]*:(?!\d{{1,5}}(?:[/?#{_END}]|$))(?:[^{_END}/?#]*@|[^{_END}]*@)"
)  # fmt: skip
_OPTIONS = re.compile(rf"(://[^{_END}?]*)\?([^{_END}#]*)")
_SECRET = re.compile(r"secret|token|passw|pwd|key|credential|signature|^sig$", re.IGNORECASE)
# Not TOKENIZERS_PARALLELISM, max_tokens or key: a word of its own, or an unmistakable part.
_SECRET_NAME = re.compile(
    r"secret|passw|passphrase|credential|(?:^|[_-])(?:token|pwd|pat)(?:[_-]|$)|(?:api|access|private|signing)[_-]?key|(?:^|[_-])auth$",
    re.IGNORECASE,
)
# Of a tokenizer: a model that is built again from a stored job needs them.
_SPECIAL_TOKEN = re.compile(r"(bos|eos|pad|unk|mask|sep|cls|additional_special)_tokens?")
_HIDDEN = "<secret>"
_SHORTEST = 8
"""A shorter value is not looked for in texts: it may stand there by chance."""
_values: set[str] = set()


def _is_secret(name: str) -> bool:
    return _SECRET_NAME.search(name) is not None and not _SPECIAL_TOKEN.fullmatch(name)


def remember(variables: Mapping[str, str]) -> None:
    """From now on `redact` also removes the values of those variables whose names say that they are secret, in this process."""
    for name, value in variables.items():
        if _is_secret(name) and len(value) >= _SHORTEST and not os.path.exists(value):
            _values.add(value)


remember(os.environ)


def redact(value: T) -> T:
    """`value` without passwords and secret options in the URIs of its strings, and without secret values; recursive for dicts,
    lists and tuples.
    """
    return _redacted(value)  # type: ignore[no-any-return]


def _redacted(value: Any) -> Any:
    if isinstance(value, str):
        for secret in _values:
            if secret in value:
                value = value.replace(secret, _HIDDEN)
        return _text(value) if "://" in value else value
    if isinstance(value, dict):
        return {
            _redacted(key): _HIDDEN
            if isinstance(item, str) and item and isinstance(key, str) and _is_secret(key)
            else _redacted(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        items = [_redacted(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def _text(text: str) -> str:
    return _OPTIONS.sub(_without_secrets, _PASSWORD.sub("", text))


def _without_secrets(match: re.Match[str]) -> str:
    place, options = match[1], match[2].split("&")
    kept = [option for option in options if not ("=" in option and _SECRET.search(option.partition("=")[0]))]
    return match[0] if len(kept) == len(options) else place + ("?" + "&".join(kept) if kept else "")


def beside(uri: str, full: str) -> str:
    """`uri`, from which secrets were removed, with the secrets of `full` if both are on the same storage; else `uri` unchanged."""
    if redact(full) == full or "://" not in uri:
        return uri
    ours, theirs = urlsplit(redact(full)), urlsplit(uri)
    if (ours.scheme, ours.netloc, ours.query) != (theirs.scheme, theirs.netloc, theirs.query):
        return uri
    whole = urlsplit(full)
    return urlunsplit((theirs.scheme, whole.netloc, theirs.path, whole.query, theirs.fragment))
