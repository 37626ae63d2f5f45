"""Secrets in URIs: which parts are secrets, which parts stay, and how a redacted URI is opened again."""

from __future__ import annotations

import pickle
import traceback

import pytest

from raydist.errors import UsageError, UserError
from raydist.redact import beside, redact
from raydist.storage import Storage


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("s3://K:S@bucket/x?region=r&scheme=http", "s3://bucket/x?region=r&scheme=http"),
        ("s3://K:a/b+c=@bucket/x", "s3://bucket/x"),
        ("s3://K:a@b@bucket/x", "s3://bucket/x"),
        ("abfs://c@account/x?client_secret=q/1&tenant_id=3", "abfs://c@account/x?tenant_id=3"),
        ("https://h/x?X-Amz-Security-Token=S#top", "https://h/x#top"),
        ("two: 's3://K:S@b/x', s3://L:T@c", "two: 's3://b/x', s3://c"),
        ("redis://:S@h:6379", "redis://h:6379"),
        ("http://127.0.0.1:5000/x@y?z=1", "http://127.0.0.1:5000/x@y?z=1"),
        ("http://[::1]:5000/x@y", "http://[::1]:5000/x@y"),
        ("gs://anonymous@bucket/x", "gs://anonymous@bucket/x"),
        ("is it? a@b:c, no://where and key=1", "is it? a@b:c, no://where and key=1"),
    ],
)
def test_what_is_a_secret(text: str, left: str) -> None:
    """Passwords, also misspelled ones, and options by their names are secrets; ports and users are not."""
    assert redact(text) == left
    assert redact(redact(text)) == left
    assert redact({"a": [(text, 1)]}) == {"a": [(left, 1)]}


def test_it_opens_again() -> None:
    """A folder next to one whose secrets are known gets them; another bucket's does not."""
    full = "s3://K:S@bucket/runs?region=r&session_token=T"
    assert beside("s3://bucket/runs/.data/1?region=r", full) == "s3://K:S@bucket/runs/.data/1?region=r&session_token=T"
    for other in ("s3://other/x?region=r", "s3://bucket/x?region=elsewhere", "/data", "gs://bucket/x?region=r"):
        assert beside(other, full) == other
    assert beside("s3://bucket/x", "s3://bucket/runs") == "s3://bucket/x"


def test_a_storage_keeps_them_to_itself() -> None:
    """A storage crosses processes and opens sub-folders with its secrets, and shows them nowhere."""
    storage = pickle.loads(pickle.dumps(Storage("s3://K:S3CRET@bucket/runs?region=r"))).at("a")
    assert storage.full_uri == "s3://K:S3CRET@bucket/runs/a?region=r"
    assert (storage.uri, repr(storage)) == ("s3://bucket/runs/a?region=r", "Storage('s3://bucket/runs/a?region=r')")


def test_errors_tell_none() -> None:
    """Neither the text nor the hint has a secret, nor the traceback of an error that pyarrow's own error caused."""
    uri = "s3://K:S3CRET@bucket/x?unknown_option=1"  # a traceback shows the source line that opens it
    with pytest.raises(UserError, match="storage 's3://bucket/x") as caught:
        Storage(uri)
    assert "S3CRET" not in "".join(traceback.format_exception(caught.value))
    crossed = pickle.loads(pickle.dumps(UsageError("s3://K:S3CRET@b", "try s3://K:S3CRET@c")))
    assert str(crossed) == "s3://b\n  try s3://c"
