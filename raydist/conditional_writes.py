"""Creates a file only if its name does not exist: by a hard link, and on S3 with `If-None-Match: *`. pyarrow cannot; botocore
can, if it is installed.

Runs anywhere. Imports botocore inside functions.
"""

from __future__ import annotations

import functools
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

if TYPE_CHECKING:
    import pyarrow.fs as pafs

_KNOWN = {"region", "scheme", "endpoint_override", "allow_bucket_creation", "allow_bucket_deletion"}
_CONFLICT_TRIES = 10
_CONFLICT_WAIT_S = 0.2
_WRITER = "raydist-writer"


def link(path: Path, to: Path) -> None:
    """A hard link. Raises OSError, FileExistsError only if `to` is another file: on NFS the answer to a link that was made may be
    lost, and the client, which asks again, is told that it exists.
    """
    try:
        os.link(path, to)
    except FileExistsError:
        if path.stat().st_nlink < 2:
            raise


class Creator:
    """Conditional writes to the buckets of one S3 server.

    `honoured`: per bucket, whether the server has refused to replace an object. Some servers ignore the condition, or do not
    implement it.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.honoured: dict[str, bool] = {}

    def create(self, path: str, data: bytes) -> bool:
        """Writes `data` to `path`, a bucket and a name; returns False if the object exists, and then leaves it.

        If `honoured` is False, it was written whether or not the object existed. Raises OSError.
        """
        bucket, _, key = path.partition("/")
        writer = uuid.uuid4().hex
        created = self._put(bucket, key, data, writer)
        if not created:
            self.honoured[bucket] = True
        elif bucket not in self.honoured:
            self.honoured[bucket] = not self._put(bucket, key, data, writer, again=True)
        return created

    def _put(self, bucket: str, key: str, data: bytes, writer: str, again: bool = False) -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            for tries in range(_CONFLICT_TRIES):
                condition = {} if self.honoured.get(bucket) is False else {"IfNoneMatch": "*"}
                try:
                    self._client.put_object(Bucket=bucket, Key=key, Body=data, Metadata={_WRITER: writer}, **condition)
                    return True
                except ClientError as error:
                    match error.response["ResponseMetadata"]["HTTPStatusCode"]:
                        case 412:
                            # A request is repeated if its answer is lost: then the object may be this writer's own.
                            return not again and self._writer(bucket, key) == writer
                        case 409 if tries < _CONFLICT_TRIES - 1:  # another one writes it at this moment
                            time.sleep(_CONFLICT_WAIT_S)
                        case 501 if condition:
                            self.honoured[bucket] = False
                        case _:
                            raise
        except (BotoCoreError, ClientError) as error:
            raise OSError(str(error)) from error
        raise AssertionError("unreachable")

    def _writer(self, bucket: str, key: str) -> str | None:
        found: str | None = self._client.head_object(Bucket=bucket, Key=key)["Metadata"].get(_WRITER)
        return found


def creator(uri: str, fs: pafs.FileSystem) -> Creator | None:
    """For a URI and its filesystem. None: it is not S3, botocore is not installed or finds no credentials, or the URI has
    parameters that are not known here.
    """
    if not uri.startswith("s3://"):
        return None
    try:
        import botocore.session  # noqa: F401
    except ImportError:
        return None
    parts = urlsplit(uri)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if not options.keys() <= _KNOWN:
        return None
    endpoint = (
        options.get("endpoint_override") or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    if endpoint is not None and "://" not in endpoint:
        endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
    return _creator(unquote(parts.username or ""), unquote(parts.password or ""), str(fs.region), endpoint)


@functools.cache
def _creator(key: str, secret: str, region: str, endpoint: str | None) -> Creator | None:
    import botocore.session
    from botocore.config import Config

    session = botocore.session.get_session()
    if key:
        session.set_credentials(key, secret)
    elif session.get_credentials() is None:
        return None
    # Path style with an endpoint, as pyarrow: the names of its buckets are rarely in the DNS. Checksums that S3 does not require
    # are refused by some other servers.
    config = Config(
        s3={"addressing_style": "path" if endpoint else "auto"},
        request_checksum_calculation="when_required",
        connect_timeout=10,
        read_timeout=30,
        retries={"mode": "standard", "total_max_attempts": 5},
    )
    return Creator(session.create_client("s3", region_name=region, endpoint_url=endpoint, config=config))
