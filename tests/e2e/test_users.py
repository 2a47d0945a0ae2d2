"""Daemon and worker run as two users, neither of them privileged, and share memory through descriptors alone."""

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from kvstore_service.client import AdminClient, StoreClient, StoreError
from tests.support.users import DAEMON_UID, daemon_of_another_user, python_of_others, user

from .conftest import ROOT, Expected, random_ids, read_tokens, worker_process, worker_settings

WORKER_UID = 12345
STEPS = 12


@pytest.mark.timeout(120)
def test_two_unprivileged_users_decode_as_the_oracle(checkpoint: Path, expected: Expected) -> None:
    seed = 61
    print(f"seed {seed}")
    python = python_of_others(WORKER_UID, modules=("decode_worker._native", "kvstore_service._native", "torch"))
    prompt = random_ids(1100, seed)
    with tempfile.TemporaryDirectory(prefix="users-", dir="/var/tmp") as name:
        directory = Path(name)
        directory.chmod(0o755)
        model = shutil.copytree(checkpoint, directory / "model", copy_function=shutil.copyfile)
        model.chmod(0o755)
        with daemon_of_another_user(directory, python, WORKER_UID) as daemon:
            order = {"config": worker_settings(daemon, model, policy="infinigen"), "prompt": prompt, "steps": STEPS}
            with worker_process(order, python, **user(WORKER_UID)) as process:
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
                cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, **user(WORKER_UID),
            )  # fmt: skip
            assert (generated.returncode, "tokens in" in generated.stderr) == (0, True), generated.stderr
            with AdminClient.connect(daemon.socket, daemon.broker) as admin:  # root may administer,
                assert admin.get_status().pid == daemon.pid
            with (  # but its workers are not served
                StoreClient.connect(daemon.socket, daemon.broker) as client,
                pytest.raises(StoreError, match="allow_uids"),
            ):
                client.fork_session("any")
    assert tokens == expected.tokens(prompt, STEPS, policy="infinigen", retriever="exact", budget=0.1)
