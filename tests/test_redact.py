"""Secrets in URIs: which parts are secrets, which parts stay, and how a redacted URI is opened again."""

from __future__ import annotations

import pickle
import traceback
from pathlib import Path

import pytest
import yaml

from raydist.errors import UsageError, UserError
from raydist.redact import beside, redact, remember
from raydist.run.directory import SPEC, RunDir
from raydist.spec import parse, stored
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


def test_variables_and_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret by its name is hidden, and its value in every text; what only looks like one stays."""
    monkeypatch.setattr("raydist.redact._values", set())
    env = {
        "HF_TOKEN": "hf_abcdefgh",
        "AWS_SECRET_ACCESS_KEY": "wJalrXUtn",
        "TOKENIZERS_PARALLELISM": "false",
        "SHORT_TOKEN": "1",
    }
    hidden = {**dict.fromkeys(env, "<secret>"), "TOKENIZERS_PARALLELISM": "false"}
    remember(env)
    assert redact({"cluster": {"env": env}, "tokens": 5, "max_tokens": "7"}) == {
        "cluster": {"env": hidden}, "tokens": 5, "max_tokens": "7",
    }  # fmt: skip
    assert redact(["denied for hf_abcdefgh: 1", 3]) == ["denied for <secret>: 1", 3]
    assert str(UserError("401 for wJalrXUtn", "export wJalrXUtn")) == "401 for <secret>\n  export <secret>"


@pytest.mark.parametrize("kind", ["bos", "eos", "pad", "unk", "mask", "sep", "cls", "additional_special"])
def test_special_tokens_of_a_tokenizer(kind: str) -> None:
    """Options of these names are no secrets; names that only contain them are."""
    kept = {f"{kind}_token": "<s>", f"{kind}_tokens": "[MASK]"}
    assert redact(kept) == kept
    for secret in (f"my_{kind}_token", f"{kind}_token_2", f"{kind.upper()}_TOKEN"):
        assert redact({secret: "<s>"}) == {secret: "<secret>"}
    options = {"bos_token": "<s>", "api_token": "hf_abcdefgh"}
    job = parse(
        {"model": {"name": "tests.ownmodels:row", "options": options}, "data": {"source": "x"}, "train": {"steps": 1}}
    )
    assert yaml.safe_load(stored(job))["model"]["options"] == {"bos_token": "<s>", "api_token": "<secret>"}


def test_a_stored_job_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """spec.yaml has the names of secret variables without their values, and can be read; the run's folder is private."""
    monkeypatch.setattr("raydist.redact._values", set())
    job = parse(
        {
            "name": "a",
            "model": {"name": "gpt"},
            "data": {"source": "x"},
            "train": {"steps": 1},
            "cluster": {"env": {"HF_TOKEN": "hf_abcdefgh", "NCCL_DEBUG": "INFO"}},
        }
    )
    text = stored(job)
    assert "hf_abcdefgh" not in text
    assert parse(yaml.safe_load(text)).cluster.env == {"HF_TOKEN": "<secret>", "NCCL_DEBUG": "INFO"}
    assert job.cluster.env["HF_TOKEN"] == "hf_abcdefgh", "the workers get it"
    run = RunDir(Storage(tmp_path / "runs").at("a"))
    run.storage.write(SPEC, text.encode())
    assert (tmp_path / "runs" / "a").stat().st_mode & 0o777 == 0o700
    (tmp_path / "runs" / "a").chmod(0o750)
    RunDir(run.uri).storage.write("x/y", b"")
    assert (tmp_path / "runs" / "a").stat().st_mode & 0o777 == 0o750, "the user's choice stays"
