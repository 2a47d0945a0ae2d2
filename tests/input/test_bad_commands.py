"""Wrong flags, values, checkpoints and prompts of `headgate`: one line and the right status."""

import contextlib
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from decode_worker import cli, cluster
from kvstore_service.client import AdminClient
from tests.support.daemon_process import Daemon

from .terminal import headgate, nothing_left, run

Refusal = Callable[..., str]


@pytest.fixture(autouse=True)
def own_signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """main takes SIGINT and SIGTERM over; settings of the caller's environment are out of the way."""
    for name in [name for name in os.environ if name.startswith(("HEADGATE_", "KVSTORE_"))]:
        monkeypatch.delenv(name)
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.fixture
def refusal(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Runs a command that must end with `status` and one line, which it returns; nothing may be left."""
    monkeypatch.setenv("TMPDIR", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(home))

    def refused(status: int, *arguments: str | Path, main: Callable[..., int] = cli.main) -> str:
        assert main([str(argument) for argument in arguments]) == status
        shown = capsys.readouterr()
        assert shown.out == ""
        (line,) = shown.err.splitlines()
        assert line.startswith(("headgate: ", "cluster: ")), line
        assert list(home.iterdir()) == []
        return line

    return refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--budget=0"], ["budget='0'", "--budget", "above 0"]),
        (["--reuse=x"], ["reuse='x'", "write '', always or label"]),
        (["--budget=1.5"], ["budget='1.5'", "fraction"]),
        (["--budget=150%"], ["budget='150%'", "100%"]),
        (["--budget=nan"], ["budget='nan'"]),
        (["--budget=inf"], ["budget='inf'"]),
        (["--budget=much"], ["budget='much'"]),
        (["--budget"], ["--budget", "expected one argument"]),
        (["--temperature=-1"], ["--temperature", "'-1'", "from 0"]),
        (["--temperature=nan"], ["--temperature", "'nan'"]),
        (["--top-p=0"], ["--top-p", "'0'", "above 0"]),
        (["--top-k=-1"], ["--top-k", "'-1'", "from 0"]),
        (["--new-tokens=0"], ["--new-tokens", "'0'", "from 1"]),
        (["--new-tokens=\u00b2"], ["--new-tokens", "whole number"]),
        (["--eta=2"], ["eta='2'", "from -1 to 1"]),
        (["--p=-1"], ["p='-1'", "from 0 to 100"]),
        (["--margin=3"], ["margin='3'", "from 0 to 2"]),
        (["--slack=x"], ["slack='x'", "number"]),
        (["--policy=best"], ["policy='best'", "qsac, litecache, infinigen, lru or full"]),
        (["--retriever=magic"], ["retriever='magic'", "exact or hash"]),
        (["--context=10"], ["context='10'", "from 64"]),
        (["--context=64", "--recent=64"], ["context=64", "sink + recent"]),
        (["--resident-bytes=lots"], ["resident_bytes='lots'", "GiB"]),
        (["--polcy=qsac"], ["--polcy", "did you mean --policy?"]),
        (["--prompt_fil=x"], ["did you mean --prompt-file?"]),
        (["word"], ["unknown word word"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and value[0].startswith("--") else "",
)
def test_a_wrong_value_names_itself_and_what_is_right(
    refusal: Refusal, checkpoint: Path, prompt: Path, flags: list[str], words: list[str]
) -> None:
    line = refusal(2, "generate", "--model", checkpoint, "--prompt-file", prompt, *flags)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND"]),
        (["demoo"], ["'demoo'", "demo", "generate"]),
        (["generate"], ["--prompt-file"]),
        (["generate", "--prompt-file=x"], ["model", "--model DIR"]),
        (["demo", "--context=1000"], ["1000", "multiple of 256"]),
        (["demo", "--questions=0"], ["--questions", "'0'"]),
        (["demo", "--context=1024", "--questions=5000"], ["--questions 5000", "1024", "fewer"]),
        (["demo", "--long=1000"], ["--long", "'1000'", "multiples of 256", "none"]),
        (["demo", "--long=8192,"], ["--long", "'8192,'"]),
        (["demo", "--no-rai"], ["--no-rai", "did you mean --no-ray?"]),
        (["--bogus"], ["unknown flag --bogus; see --help"]),
        (["generate", "--bogus"], ["unknown flag --bogus; see --help"]),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_wrong_usage_says_what_is_missing(refusal: Refusal, arguments: list[str], words: list[str]) -> None:
    line = refusal(2, *arguments)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["No such file"]),
        (b" \n", ["empty"]),
        (b"a text \xff\xfe", ["byte 7", "UTF-8"]),
        (b"some\0bytes", ["byte 4", "NUL"]),
        (b"word " * 300, ["300 tokens", "--context 2048", "longer text"]),
        (b"word " * 1500, ["1500 tokens", "--context 2048", "or --context 1280"]),
    ],
    ids=["missing", "empty", "not UTF-8", "binary", "too short", "short"],
)
def test_a_document_that_cannot_be_used_says_why(
    refusal: Refusal, tmp_path: Path, content: bytes | None, words: list[str]
) -> None:
    file = tmp_path / "document.txt"
    if content is not None:
        file.write_bytes(content)
    line = refusal(1, "demo", "--context=2048", "--questions=5", f"--document={file}")
    assert str(file) in line
    assert all(word in line for word in words), line


def test_a_directory_is_no_document(refusal: Refusal, tmp_path: Path) -> None:
    assert "Is a directory" in refusal(1, "demo", "--context=2048", f"--document={tmp_path}")


def test_settings_of_the_file_and_the_environment_are_named(
    refusal: Refusal, checkpoint: Path, prompt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "worker.yaml"
    flags = ["generate", f"--model={checkpoint}", f"--prompt-file={prompt}", f"--config={file}"]
    assert "No such file" in refusal(2, *flags)
    for content, words in {
        b"budgit: 0.1": ["budgit", "did you mean budget?"],
        b"budget: 0": ["budget=0", f"file {file}"],
        b"budget:": ["budget has no value"],
        b"budget: [1, ": ["line 1"],
        b"- budget": ["not a mapping"],
        b"\x80\x81": ["not text"],
    }.items():
        file.write_bytes(content)
        line = refusal(2, *flags)
        assert str(file) in line
        assert all(word in line for word in words), line
    file.write_text("")
    monkeypatch.setenv("HEADGATE_BUDGIT", "0.1")
    assert "HEADGATE_BUDGIT; did you mean HEADGATE_BUDGET?" in refusal(2, *flags)


def edited(**values: object) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | values))

    return edit


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def edit(model: Path) -> None:
        content = (model / name).read_bytes()
        (model / name).write_bytes(content[: int(keep * len(content))])

    return edit


def removed(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def with_a_word_more(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["extra"] = 300
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (shutil.rmtree, ["config.json", "No such file", "give a checkpoint directory"]),
        (removed("config.json"), ["config.json", "No such file"]),
        (cut("config.json", 0.5), ["config.json", "not valid JSON", "fetch"]),
        (removed("model.safetensors"), ["model.safetensors", "convert"]),
        (cut("model.safetensors", 0.9), ["model.safetensors", "not a complete safetensors file", "fetch"]),
        (cut("model.safetensors", 0.0), ["model.safetensors", "fetch"]),
        (edited(model_type="gpt2"), ["model_type", "'gpt2'", "llama, mistral, qwen2, qwen3, phi3"]),
        (edited(vocab_size=100), ["embed_tokens", "[256, 128]", "[100, 128]"]),
        (edited(num_hidden_layers=6), ["model.layers.4", "missing"]),
        (edited(max_position_embeddings=512), ["context=4096", "1 to 512", "--context 512"]),
        (removed("tokenizer.json"), ["tokenizer.json is missing", "fetch"]),
        (cut("tokenizer.json", 0.5), ["tokenizer.json is not a tokenizer", "fetch"]),
        (with_a_word_more, ["token id 300", "vocab_size", "256"]),
    ],
    ids=["directory", "config", "config-cut", "weights", "weights-cut", "weights-empty", "architecture", "vocabulary",
         "layers", "positions", "tokenizer", "tokenizer-cut", "tokenizer-larger"],
)  # fmt: skip
def test_a_bad_checkpoint_is_one_line(
    refusal: Refusal, checkpoint: Path, prompt: Path, tmp_path: Path, spoil: Callable[[Path], None], words: list[str]
) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    spoil(model)
    line = refusal(1, "generate", "--private", f"--model={model}", f"--prompt-file={prompt}", "--context=4096")
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["No such file", "text file"]),
        (b"", ["empty"]),
        (b" \n\t", ["empty"]),
        (b"\x80\xff", ["byte 0 is not UTF-8"]),
        (b"w1 w2 \x00\x00", ["byte 6 is NUL", "text file"]),
    ],
    ids=["missing", "empty", "blank", "binary", "nul"],
)
def test_a_prompt_that_is_no_text(
    refusal: Refusal, checkpoint: Path, tmp_path: Path, content: bytes | None, words: list[str]
) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    line = refusal(1, "generate", "--private", f"--model={checkpoint}", f"--prompt-file={file}", "--context=4096")
    assert all(word in line for word in [str(file), *words]), line


def test_a_directory_or_a_device_is_no_prompt(refusal: Refusal, checkpoint: Path, tmp_path: Path) -> None:
    flags = ["generate", "--private", f"--model={checkpoint}", "--context=4096"]
    assert "Is a directory" in refusal(1, *flags, f"--prompt-file={tmp_path}")
    assert "NUL" in refusal(1, *flags, "--prompt-file=/dev/zero")


def test_a_prompt_beyond_the_context_or_the_model(refusal: Refusal, checkpoint: Path, prompt: Path) -> None:
    flags = ["generate", "--private", f"--model={checkpoint}", f"--prompt-file={prompt}"]
    longer = refusal(1, *flags, "--context=610", "--new-tokens=20")
    assert all(word in longer for word in ("600 prompt tokens", "20 new", "--context 610", "give --context 620")), (
        longer
    )
    beyond = refusal(1, *flags, "--context=4096", "--new-tokens=3500")
    assert all(word in beyond for word in ("600 prompt tokens", "covers 4096", "shorten")), beyond
    assert "--context 4096" in refusal(1, *flags, "--context=5000")


def test_without_a_daemon_it_says_how_to_get_one(
    refusal: Refusal, checkpoint: Path, prompt: Path, tmp_path: Path
) -> None:
    sockets = [f"--socket={tmp_path}/store.sock", f"--broker={tmp_path}/broker.sock"]
    flags = ["generate", f"--model={checkpoint}", f"--prompt-file={prompt}", "--context=4096", *sockets]
    line = refusal(1, *flags)
    assert all(word in line for word in (f"{tmp_path}/broker.sock", "kvstored", "--private")), line
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as stale:
        stale.bind(f"{tmp_path}/broker.sock")
        assert "--private" in refusal(1, *flags)


@pytest.mark.parametrize(("missing", "arguments", "words"), [
    ("ray", ["demo", "--context=1024"], ["ray is not installed", "headgate[serve]", "--no-ray"]),
    ("torch", ["demo", "--context=1024", "--no-ray"], ["torch is not installed", "headgate[worker]"]),
])  # fmt: skip
@pytest.mark.timeout(60)
def test_a_missing_package_says_how_to_install_it(
    home: Path, tmp_path: Path, missing: str, arguments: list[str], words: list[str]
) -> None:
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('No module named {missing}', name='{missing}')")
    with nothing_left(home):
        done = run(headgate(*arguments), home, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words), line


def test_a_cluster_that_is_not_there(refusal: Refusal, checkpoint: Path) -> None:
    assert "did you mean --policy?" in refusal(2, "--polcy=x", main=cluster.main)
    assert "--model DIR" in refusal(2, main=cluster.main)


@pytest.mark.timeout(90)
def test_a_store_that_is_too_small_or_closed_to_this_user(
    home: Path, tmp_path: Path, checkpoint: Path, prompt: Path
) -> None:
    """The daemon's own words reach the user, and its sessions are closed again."""
    options = ("--nvme-bytes=1MiB", "--copy-threads=1")
    flags = [f"--model={checkpoint}", f"--prompt-file={prompt}", "--context=1024"]
    with Daemon(tmp_path, "16MiB", options=options) as daemon:
        command = headgate("generate", *flags, f"--socket={daemon.socket}", f"--broker={daemon.broker}")
        done = run(command, home)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert "nvme_bytes" in line, line
        with AdminClient.connect(daemon.socket, daemon.broker) as admin:
            assert admin.get_status().sessions == 0
    with Daemon(
        tmp_path / "closed", "16MiB", options=(f"--allow-uids={os.getuid() + 1}", f"--socket-group={os.getegid()}")
    ) as daemon:
        done = run(headgate("generate", *flags, f"--socket={daemon.socket}", f"--broker={daemon.broker}"), home)
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert f"user id {os.getuid()} is not in allow_uids" in line, line


@pytest.mark.timeout(60)
def test_an_answer_that_ends_at_once_says_why(home: Path, tmp_path: Path, checkpoint: Path, prompt: Path) -> None:
    model = shutil.copytree(checkpoint, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(256))}))
    flags = ["--private", f"--model={model}", f"--prompt-file={prompt}", "--context=1024"]
    with nothing_left(home):
        done = run(headgate("generate", *flags), home)
    assert done.returncode == 0, done.stderr
    assert "0 tokens in" in done.stderr
    assert "end-of-sequence token" in done.stderr


@pytest.mark.parametrize("command", [["headgate", "demo"], ["headgate", "generate"]], ids=" ".join)
def test_help_shows_default_and_range_of_every_flag(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command[1:], "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    policies = "qsac, litecache, infinigen, lru or full"
    for words in ("default: 0.1", "from -1 to 1", "exact or hash", "at least 64KiB", policies, "from 1 to"):
        assert words in shown, words
