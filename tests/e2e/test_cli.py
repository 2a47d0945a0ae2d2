"""`headgate generate` as a user runs it: text on stdout, one line per error, an exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.daemon_process import Daemon

from .conftest import ROOT, random_ids


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with its temporary files under `tmp_path`."""
    command = [sys.executable, "-m", "decode_worker.cli", "generate", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HEADGATE_", "KVSTORE_"))}
    environment["TMPDIR"] = str(tmp_path)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)


def prompt_file(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "prompt.txt"
    path.write_bytes(content)
    return str(path)


def assert_one_line(done: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    assert done.returncode == status, done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("headgate"), line
    assert all(word in line for word in words), line


@pytest.mark.timeout(90)
def test_generate_streams_text_and_leaves_nothing(tmp_path: Path, checkpoint: Path) -> None:
    words = " ".join(f"w{token}" for token in random_ids(600, 95))
    file = prompt_file(tmp_path, words.encode())
    flags = ["--model", str(checkpoint), "--prompt-file", file, "--private", "--new-tokens", "12"]
    done = run(tmp_path, *flags, "--context", "1024", "--retriever", "exact", "--profile", "off")
    assert done.returncode == 0, done.stderr
    generated = done.stdout.split()
    assert len(generated) == 12
    assert all(word.startswith("w") and word[1:].isdigit() for word in generated)
    assert "12 tokens in" in done.stderr
    assert "the first after" in done.stderr
    assert "0 of 600 prompt tokens were in the store" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["prompt.txt"]


@pytest.mark.timeout(90)
def test_generate_says_in_json_what_it_took_and_reused(tmp_path: Path, checkpoint: Path) -> None:
    words = " ".join(f"w{token}" for token in random_ids(1100, 96))
    flags = ["--model", str(checkpoint), "--prompt-file", prompt_file(tmp_path, words.encode()), "--new-tokens", "6"]
    with Daemon(tmp_path / "daemon", "16MiB") as daemon:
        flags += ["--context", "2048", "--socket", daemon.socket, "--broker", daemon.broker, "--json"]
        first, second = (json.loads(run(tmp_path, *flags).stdout) for _ in range(2))
    assert (first["finish"], first["text"]) == ("length", second["text"])
    assert (first["window"], first["windows_refused"]) == ("shm", {})
    assert len(first["text"].split()) == 6
    for shown, reused in ((first, 0), (second, 1024)):
        figures = {figure["name"]: figure["value"] for figure in shown["figures"]}
        assert (figures["prompt_tokens"], figures["reused_tokens"], figures["generated_tokens"]) == (1100, reused, 6)
        assert figures["time_to_first_token"] > 0
        assert figures["decode"] > 0
        assert 0 < figures["prefill_share"] < 1


@pytest.mark.timeout(90)
def test_a_window_that_cannot_be_had_is_one_line_with_the_reason(tmp_path: Path, checkpoint: Path) -> None:
    flags = ["--model", str(checkpoint), "--prompt-file", prompt_file(tmp_path, b"w1 w2"), "--private"]
    assert_one_line(run(tmp_path, *flags, "--window", "staged"), 1, "window staged: the daemon's windows are pull, shm")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("window", ["bounce", "pull"])
def test_kernels_refuse_a_window_whose_records_they_would_never_see(
    tmp_path: Path, checkpoint: Path, window: str
) -> None:
    flags = ["--model", str(checkpoint), "--prompt-file", prompt_file(tmp_path, b"w1 w2"), "--private"]
    assert_one_line(run(tmp_path, *flags, "--window", window), 1, "give --window shm or --kernels triton")


@pytest.mark.timeout(90)
def test_a_wrong_flag_is_one_line(tmp_path: Path, checkpoint: Path) -> None:
    file = prompt_file(tmp_path, b"w1 w2")
    flags = ["--model", str(checkpoint), "--prompt-file", file]
    assert_one_line(run(tmp_path, *flags, "--polcy", "qsac"), 2, "--polcy")
    assert_one_line(run(tmp_path, *flags, "--policy", "best"), 2, "policy", "best")


@pytest.mark.timeout(90)
def test_a_missing_checkpoint_is_one_line(tmp_path: Path) -> None:
    file = prompt_file(tmp_path, b"w1 w2")
    missing = str(tmp_path / "nowhere")
    assert_one_line(run(tmp_path, "--model", missing, "--prompt-file", file, "--private"), 1, missing)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("content", "word"), [(b" \n", "empty"), (b"\x80\xff\x00", "UTF-8")], ids=["empty", "binary"])
def test_a_prompt_that_is_no_text_is_one_line(tmp_path: Path, checkpoint: Path, content: bytes, word: str) -> None:
    file = prompt_file(tmp_path, content)
    assert_one_line(run(tmp_path, "--model", str(checkpoint), "--prompt-file", file, "--private"), 1, file, word)
