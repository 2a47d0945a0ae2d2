"""Daemon and worker run as two users, neither of them privileged, and share memory through descriptors alone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore_service.client import AdminClient, StoreClient, StoreError
from kvstore_service.client.private import PrivateDaemon

from .conftest import ROOT, Expected, random_ids, read_tokens, worker_process, worker_settings

DAEMON_UID, WORKER_UID = 65534, 12345
STEPS = 12


def python_of_others() -> str:
    """An interpreter that both users can run over this checkout; skips the test where there is none."""
    if os.getuid() != 0:
        pytest.skip("needs root, to start processes as two other users")
    for python in (sys.executable, f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"):
        if all(can_run(python, uid) for uid in (DAEMON_UID, WORKER_UID)):
            return python
    pytest.skip(f"needs a Python {sys.version_info.major}.{sys.version_info.minor} and {ROOT} readable by other users")


def can_run(python: str, uid: int) -> bool:
    probe = [python, "-c", "import decode_worker._native, kvstore_service._native, torch"]
    try:
        done = subprocess.run(
            probe, cwd=ROOT, env=environment(), user=uid, group=uid, extra_groups=[],
            timeout=60, check=False, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return False
    return done.returncode == 0


def environment() -> dict[str, str]:
    """This checkout and these packages, for an interpreter from anywhere."""
    return {
        "PATH": os.defpath,
        "HOME": "/",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent / "site"), str(ROOT)]),
        "PACKAGES_OF_TESTS": sysconfig.get_path("purelib"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


@contextmanager
def daemon_of_another_user(directory: Path, python: str) -> Iterator[PrivateDaemon]:
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("needs setpriv")
    user = (setpriv, f"--reuid={DAEMON_UID}", f"--regid={DAEMON_UID}", "--clear-groups", "--pdeathsig=TERM")
    variables = ("env", "-i", *(f"{name}={value}" for name, value in environment().items()))
    data_dir = directory / "data"
    data_dir.mkdir(mode=0o700)
    os.chown(data_dir, DAEMON_UID, DAEMON_UID)
    daemon = PrivateDaemon(
        data_dir,
        "4MiB",
        options=("--nvme-bytes=1GiB", f"--allow-uids={WORKER_UID}", f"--socket-group={DAEMON_UID}"),
        argv=(*user, *variables, python, "-m", "kvstore_service.daemon.server"),
    )
    os.chown(daemon.run_dir, DAEMON_UID, DAEMON_UID)
    daemon.run_dir.chmod(0o711)
    with daemon:
        yield daemon


@pytest.mark.timeout(120)
def test_two_unprivileged_users_decode_as_the_oracle(checkpoint: Path, expected: Expected) -> None:
    seed = 61
    print(f"seed {seed}")
    python = python_of_others()
    prompt = random_ids(1100, seed)
    with tempfile.TemporaryDirectory(prefix="users-", dir="/var/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        model = shutil.copytree(checkpoint, directory / "model", copy_function=shutil.copyfile)
        model.chmod(0o755)
        with daemon_of_another_user(directory, python) as daemon:
            order = {"config": worker_settings(daemon, model, policy="none"), "prompt": prompt, "steps": STEPS}
            user = {"user": WORKER_UID, "group": WORKER_UID, "extra_groups": [DAEMON_UID], "env": environment()}
            with worker_process(order, python, **user) as process:
                tokens = read_tokens(process, STEPS)
            assert Path(f"/proc/{daemon.pid}").stat().st_uid == DAEMON_UID
            retriever = shutil.copytree(
                ROOT / "models/retriever", directory / "retriever", copy_function=shutil.copyfile
            )
            prompt_file = directory / "prompt.txt"
            prompt_file.write_text("the licence of this program " * 200)
            where = ["--socket", daemon.socket, "--broker", daemon.broker, "--context=4096", "--new-tokens=4"]
            command = [python, "-m", "decode_worker.cli", "generate", "--model", str(retriever), *where]
            generated = subprocess.run(
                [*command, "--prompt-file", str(prompt_file)],
                cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **user,
            )  # fmt: skip
            assert (generated.returncode, "tokens in" in generated.stderr) == (0, True), generated.stderr
            with AdminClient.connect(daemon.socket, daemon.broker) as admin:  # root may administer,
                assert admin.get_status().pid == daemon.pid
            with (  # but its workers are not served
                StoreClient.connect(daemon.socket, daemon.broker) as client,
                pytest.raises(StoreError, match="allow_uids"),
            ):
                client.fork_session("any")
    assert tokens == expected.tokens(prompt, STEPS, policy="none", retriever="exact", budget=0.1)
