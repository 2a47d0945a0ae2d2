"""The disk of the crash model by itself: what was synced stays, and everything else meets each of its fates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support import shim_build

SCRIPT = """
import errno, json, os, sys
from pathlib import Path
from tests.crash.power import disk

BLOCK, OLD, NEW = 4096, b"o" * 4096, b"n" * 4096

def synced(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)

def change(root, aside, seed, faults):
    disk.begin(root, aside, seed, 0, faults)
    fd = os.open(root / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(fd, OLD * 4, 0)
    os.fsync(fd)
    (root / "kept").write_bytes(b"k")
    synced(root / "kept")
    synced(root)
    os.pwrite(fd, NEW * 3, 2 * BLOCK)  # over two blocks, and one more
    (root / "fresh").write_bytes(b"f")
    (root / "kept").rename(root / "moved")
    disk.crash()

def fate(content):
    if content in (b"", OLD, NEW):
        return {b"": "cut", OLD: "old", NEW: "new"}[content]
    if len(content) < BLOCK:
        return "short"
    torn = all(content[at : at + 512] in (OLD[:512], NEW[:512]) for at in range(0, BLOCK, 512))
    return "torn" if torn else "garbage"

def read(root, aside, report):
    disk.begin(root, aside, 0, 0, set())
    fd = os.open(root / "file", os.O_RDWR)
    found = {"kept": fate(os.pread(fd, BLOCK, 0)) == fate(os.pread(fd, BLOCK, BLOCK)) == "old"}
    found["names"] = sorted(path.name for path in root.iterdir())
    found["fates"] = []
    for block in (2, 3, 4):
        try:
            found["fates"].append(fate(os.pread(fd, BLOCK, block * BLOCK)))
        except OSError as error:
            assert error.errno == errno.EIO
            found["fates"].append("unreadable")
            try:
                os.pwrite(fd, b"part", block * BLOCK)
                found["kept"] = False
            except OSError:
                os.pwrite(fd, NEW, block * BLOCK)
                assert os.pread(fd, BLOCK, block * BLOCK) == NEW
    os.write(report, json.dumps(found).encode())
    os._exit(0)

def child(act, *arguments):
    pid = os.fork()
    if not pid:
        try:
            act(*arguments)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for seed in range(int(sys.argv[2])):
    root, aside = Path(sys.argv[1], f"{seed}", "root"), Path(sys.argv[1], f"{seed}", "aside")
    root.mkdir(parents=True)
    aside.mkdir()
    report = os.memfd_create("report")
    assert child(change, root, aside, seed, set(json.loads(sys.argv[3]))) == disk.CRASHED
    assert child(read, root, aside, report) == 0
    print(os.pread(report, 4096, 0).decode())
"""


def crashes(directory: Path, count: int, faults: list[str]) -> list[dict]:
    """What is left of a file with two synced blocks and three others, and of its directory, after each of the seeds."""
    environment = {**os.environ, "LD_PRELOAD": str(shim_build.crash_model()), "PYTHONPATH": str(shim_build.ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, directory, str(count), json.dumps(faults)],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_what_was_synced_stays_and_the_rest_meets_every_fate(tmp_path: Path) -> None:
    faults = ["old blocks", "garbage blocks", "torn blocks", "unreadable blocks", "old sizes", "old names"]
    found = crashes(tmp_path, 150, faults)
    assert all(each["kept"] for each in found)
    assert {"old", "new", "garbage", "torn", "unreadable"} <= {fate for each in found for fate in each["fates"][:2]}
    assert {"cut", "short", "new"} <= {each["fates"][2] for each in found}
    names = {tuple(each["names"]) for each in found}
    assert names == {
        ("file", "kept"), ("file", "moved"), ("file", "fresh", "kept"), ("file", "fresh", "moved"),
    }  # fmt: skip


def test_without_faults_a_crash_is_like_the_end_of_a_process(tmp_path: Path) -> None:
    for each in crashes(tmp_path, 3, []):
        assert each == {"kept": True, "names": ["file", "fresh", "moved"], "fates": ["new", "new", "new"]}
