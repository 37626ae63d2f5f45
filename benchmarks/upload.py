"""A checkpoint's upload to S3 over boto3's parallel upload of as many bytes, in one interleaved run. Asked: 0.9.

    python benchmarks/upload.py [--rounds 8] [--mib 256] [--rates none 1gbit]

A rank and an S3 server (moto) are on hosts of their own, network namespaces whose link has the rate. In each round, in any order:

    save    raydist's Saver: plan, hash, one shard, manifest, and what it deletes of older checkpoints
    boto3   upload_fileobj from memory in parts of 8 MiB by ten threads, as `aws s3 cp` does
    write   Storage.create alone, without a hash and a manifest

`bandwidth`: the median over the rounds of boto3's seconds over a way's. `processor`: seconds of processor time of this process.

Checksums are off for both (AWS_REQUEST_CHECKSUM_CALCULATION): Arrow's client sends them within the body, which moto takes apart in
Python, at half of the speed; a server that does so in native code, as S3, costs nothing.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import boto3
import torch
from boto3.s3.transfer import TransferConfig
from common import write

from raydist.run.directory import RunDir
from raydist.storage import Storage
from raydist.worker.checkpoint.save import Saver

PORT, PART = 9000, 8 << 20


def measure(server: str, mib: int, rounds: int) -> dict[str, Any]:
    """{way: figures}."""
    deadline = time.monotonic() + 60
    while True:
        try:
            urlopen(Request(f"http://{server}/bucket", method="PUT"), timeout=5).close()
            break
        except (URLError, OSError):
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.2)
    uri = f"s3://key:secret@bucket/runs/one?endpoint_override={server}&scheme=http&region=us-east-1"
    tensors = {f"model/{i}": torch.rand(4 << 18) for i in range(mib // 4)}
    data = torch.cat([*tensors.values()]).numpy().tobytes()
    saver = Saver(RunDir(uri), rank=0, world_size=1, group=None, asynchronous=False, keep=1, attempt=1, spec_hash="",
                  numbers={}, on_event=lambda event: None)  # fmt: skip
    client = boto3.client("s3", endpoint_url=f"http://{server}", aws_access_key_id="key", aws_secret_access_key="secret",
                          region_name="us-east-1")  # fmt: skip
    parallel = TransferConfig(multipart_threshold=PART, multipart_chunksize=PART, max_concurrency=10)
    step = 0

    def save() -> None:
        nonlocal step
        step += 1
        saver.start(step, tensors, {}, {})
        assert saver.wait(), "the save failed"

    def put() -> None:
        client.upload_fileobj(io.BytesIO(data), "bucket", "boto3", Config=parallel)

    def create() -> None:
        view = memoryview(data)
        with Storage(uri).create("alone") as sink:
            for first in range(0, len(view), 1 << 20):
                sink.write(view[first : first + (1 << 20)])

    ways: dict[str, Callable[[], None]] = {"save": save, "boto3": put, "write": create}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    order = random.Random(0)
    for turn in range(rounds + 1):
        for name in order.sample(list(ways), len(ways)):
            begun, busy = time.perf_counter(), time.process_time()
            ways[name]()
            if turn:  # the first one opens connections, and makes the staging buffer
                seconds[name].append(time.perf_counter() - begun)
                processor[name].append(time.process_time() - busy)
    saver.close()
    return {
        name: {
            "bandwidth": round(
                statistics.median(b / s for b, s in zip(seconds["boto3"], seconds[name], strict=True)), 3
            ),
            "mb_s": round(len(data) / statistics.median(seconds[name]) / 1e6, 1),
            "processor": round(statistics.median(processor[name]), 3),
        }
        for name in ways
    }


def on_two_hosts(rate: str, mib: int, rounds: int) -> dict[str, Any]:
    """`measure` with the server on another host. Needs root."""
    from tests.hosts import Hosts

    with Hosts(2, None if rate == "none" else rate) as hosts:
        serve = [sys.executable, "-m", "moto.server", "-H", hosts[1].ip, "-p", str(PORT)]
        server = hosts[1].popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        command = [sys.executable, __file__, "--server", f"{hosts[1].ip}:{PORT}", "--mib", str(mib)]
        done = hosts[0].run([*command, "--rounds", str(rounds)], timeout=3600)
        server.kill()
        server.wait(60)
        if done.returncode:
            sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rates", nargs="+", default=["none", "1gbit"])
    parser.add_argument("--server", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.server:
        os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] = "when_required"
        print(json.dumps(measure(options.server, options.mib, options.rounds)), flush=True)
        sys.exit()
    result = {rate: on_two_hosts(rate, options.mib, options.rounds) for rate in options.rates}
    print(write("upload", {"mib": options.mib, "rounds": options.rounds, **result}).read_text())
