"""Two users at once, each with processes of its own: what one gets does not depend on how many the other has."""

import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.document import counters
from kvstore_service.client import AdminClient
from tests.support.users import ROOT, daemon_of_another_user, python_of_others, user

STORMING, DECODING = 12345, 12346  # uids
STORM = ("flood", "flood", "flood", "bulk", "hints", "reads")
SHARE_MIN = 0.3  # of the bytes copied; fair is a half, and between workers alone a fifth or less


@pytest.mark.timeout(180)
def test_a_storm_of_one_user_leaves_the_other_its_share() -> None:
    python = python_of_others(STORMING, DECODING, modules=("bench.neighbour", "kvstore_service._native"))
    with tempfile.TemporaryDirectory(prefix="storm-", dir="/var/tmp") as name, ExitStack() as stack:
        directory = Path(name)
        directory.chmod(0o755)
        options = ("--nvme-bytes=1GiB", "--copy-threads=1", "--pack-tokens=16384")
        daemon = stack.enter_context(
            daemon_of_another_user(directory, python, STORMING, DECODING, dram_bytes="32MiB", options=options)
        )

        def start(kind: str, uid: int) -> "subprocess.Popen[str]":
            command = [python, "-m", "tests.isolation.storm", kind, daemon.socket, daemon.broker]
            process = stack.enter_context(
                subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, **user(uid)
                )
            )
            stack.callback(process.kill)
            assert answer(process) == "ready"
            return process

        decoder = start("decoder", DECODING)
        storm = [start(kind, STORMING) for kind in STORM]
        before = counters(daemon)
        assert decoder.stdin is not None
        print("go", file=decoder.stdin, flush=True)
        mine = int(answer(decoder))
        after = counters(daemon)
        assert all(process.poll() is None for process in storm)
        assert mine / (after["bytes_copied"] - before["bytes_copied"]) >= SHARE_MIN
        assert after["worker_faults"] == after["crc_errors"] == 0
        with AdminClient.connect(daemon.socket, daemon.broker) as admin:
            assert all(check.ok for check in admin.audit())


def answer(process: "subprocess.Popen[str]") -> str:
    """Its next line; the test's own timeout ends the wait."""
    assert process.stdout is not None
    return process.stdout.readline().strip()
