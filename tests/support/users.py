"""Daemon and workers as different, unprivileged users. Needs root; a test is skipped where that cannot be."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore_service.client.private import PrivateDaemon

ROOT = Path(__file__).parents[2]
SITE = ROOT / "tests" / "e2e" / "site"
DAEMON_UID = 65534


def python_of_others(*uids: int, modules: Sequence[str]) -> str:
    """An interpreter with which the daemon's user and these can import `modules` from this checkout; skips the test
    where there is none."""
    if os.getuid() != 0:
        pytest.skip("needs root, to start processes as other users")
    for python in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        if all(can_run(python, uid, modules) for uid in (DAEMON_UID, *uids)):
            return python
    pytest.skip(f"needs a Python {sys.version_info.major}.{sys.version_info.minor} and {ROOT} readable by other users")


def can_run(python: str, uid: int, modules: Sequence[str]) -> bool:
    probe = [python, "-c", f"import {', '.join(modules)}"]
    try:
        done = subprocess.run(probe, cwd=ROOT, timeout=60, check=False, stderr=subprocess.DEVNULL, **user(uid))
    except OSError:
        return False
    return done.returncode == 0


def user(uid: int) -> dict[str, Any]:
    """Options of Popen for a process of this user that may reach the daemon's sockets."""
    return {"user": uid, "group": uid, "extra_groups": [DAEMON_UID], "env": environment()}


def environment() -> dict[str, str]:
    """This checkout and these packages, for an interpreter from anywhere."""
    return {
        "PATH": os.defpath,
        "HOME": "/",
        "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]),
        "PACKAGES_OF_TESTS": sysconfig.get_path("purelib"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@contextmanager
def daemon_of_another_user(
    directory: Path, python: str, *uids: int, dram_bytes: str = "4MiB", options: Sequence[str] = ("--nvme-bytes=1GiB",)
) -> Iterator[PrivateDaemon]:
    """One that serves `uids`; its data lies under `directory`, which is for everybody to enter."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("needs setpriv")
    identity = (setpriv, f"--reuid={DAEMON_UID}", f"--regid={DAEMON_UID}", "--clear-groups", "--pdeathsig=TERM")
    variables = ("env", "-i", *(f"{name}={value}" for name, value in environment().items()))
    data_dir = directory / "data"
    data_dir.mkdir(mode=0o700)
    os.chown(data_dir, DAEMON_UID, DAEMON_UID)
    allowed = ",".join(map(str, uids))
    daemon = PrivateDaemon(
        data_dir,
        dram_bytes,
        options=(*options, f"--allow-uids={allowed}", f"--socket-group={DAEMON_UID}"),
        argv=(*identity, *variables, python, "-m", "kvstore_service.daemon.server"),
    )
    os.chown(daemon.run_dir, DAEMON_UID, DAEMON_UID)
    daemon.run_dir.chmod(0o711)
    with daemon:
        yield daemon
