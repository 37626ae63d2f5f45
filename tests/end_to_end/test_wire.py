"""The bytes of the collective counters compared with those of the network interface, on two hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raydist import registry
from tests.end_to_end import sender
from tests.hosts import Hosts


def test_bytes_are_those_of_the_interface() -> None:
    """They agree within 5% for each kind of collective, strategy and rank; the difference is headers and acknowledgements."""
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    with Hosts(2) as hosts:
        command = [sys.executable, sender.__file__]
        ranks = [
            host.popen([*command, str(i), hosts[0].ip], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for i, host in enumerate(hosts)
        ]
        told = [rank.communicate(timeout=300) for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0], told
    for rank, (out, _) in enumerate(told):
        found = json.loads(out)
        assert found["all_reduce"][0] == sender.TIMES * 4 * sender.N
        assert set(found) > set(registry.names("parallel"))
        assert all(found[strategy][0] > sender.TIMES * 4 * sender.N for strategy in registry.names("parallel"))
        for op, (ours, theirs) in found.items():
            if op == "send_recv" and rank == 1:
                assert ours == 0
                assert theirs < 0.05 * sender.TIMES * 4 * sender.N
            else:
                assert ours == pytest.approx(theirs, rel=0.05), op
