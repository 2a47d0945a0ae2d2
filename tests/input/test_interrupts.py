"""Ctrl-C and SIGTERM at every phase: one line, the right status, nothing left behind."""

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from kvstore_service.client import KindSpec, Layout, StoreClient, StoreError

from .conftest import StartTerminal
from .terminal import CTRL_C, headgate, kvstored, nothing_left, run

DEMO = headgate("demo", "--long=none", "--context=1024", "--questions=100")
LAYOUT = Layout(b"f" * 32, 2, (KindSpec(2, 64, 2, 256),))
END_S = 30.0  # 10 on an idle machine


def assert_quiet(text: str) -> None:
    assert "Traceback" not in text, text
    assert "Exception ignored" not in text, text


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "shown", ["a generation behind 32,768 tokens", "starting a private daemon", "prefill", "questions, qsac"]
)
def test_ctrl_c_ends_a_demo(home: Path, terminal: StartTerminal, shown: str) -> None:
    with nothing_left(home):
        demo = terminal([*DEMO, "--no-ray", *(["--long=32768"] if "generation" in shown else [])])
        demo.wait_for(shown)
        demo.press(CTRL_C)
        assert demo.end(END_S) == 130, demo.text
        assert demo.last_line == "headgate: interrupted"
        assert_quiet(demo.text)


DROPPED = """
import signal, sys, time
from decode_worker import cli

class Finalised:
    def __del__(self):
        signal.raise_signal(signal.{name})

class CleanUp:
    def __enter__(self): ...
    def __exit__(self, *_):
        time.sleep(0.3)
        print("cleaned up")

def dropping():
    try:
        signal.raise_signal(signal.{name})
    except BaseException:
        pass

def run(arguments):
    with CleanUp():
        {where}()
        time.sleep(60)

cli._demo = run
sys.exit(cli.main(["demo"]))
"""


@pytest.mark.parametrize("where", ["Finalised", "dropping"])
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_signal_that_a_library_drops_is_not_lost(home: Path, name: str, status: int, where: str) -> None:
    ended = run([sys.executable, "-c", DROPPED.format(name=name, where=where)], home)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout == "cleaned up\n"
    assert_quiet(ended.stderr)


@pytest.mark.timeout(60)
def test_an_interrupt_while_a_call_begins_holds_up_nothing(
    home: Path, terminal: StartTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC then has a call whose answer no thread waits for: later ones keep their deadlines, and it can be closed."""
    terminal(daemon(home)).wait_for("kvstored ready")
    client = StoreClient.connect(f"{home}/store.sock", f"{home}/broker.sock", timeout_s=1.0)
    client.guard(lambda: None)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("grpc._channel._run_channel_spin_thread", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.open_session(LAYOUT, 1024)
    with pytest.raises(StoreError, match="DEADLINE_EXCEEDED"):
        client.open_session(LAYOUT, 1024)
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(END_S)
    assert not closing.is_alive()


@pytest.mark.timeout(120)
def test_sigterm_ends_a_demo_while_full_attention_answers(home: Path, terminal: StartTerminal) -> None:
    with nothing_left(home):
        demo = terminal([*DEMO, "--no-ray", "--questions=5"])
        demo.wait_for("questions, full")
        demo.process.send_signal(signal.SIGTERM)
        assert demo.end(END_S) == 143, demo.text
        assert demo.last_line == "headgate: terminated"
        assert_quiet(demo.text)


@pytest.mark.timeout(120)
def test_ctrl_c_while_ray_starts(home: Path, terminal: StartTerminal) -> None:
    with nothing_left(home):
        demo = terminal(DEMO)
        demo.wait_for("starting a local Ray")
        demo.press(CTRL_C)
        assert demo.end(END_S) == 130, demo.text
        assert demo.last_line == "headgate: interrupted"
        assert_quiet(demo.text)


@pytest.mark.timeout(120)
def test_impatient_ctrl_c_ends_a_generation_in_order(
    home: Path, terminal: StartTerminal, checkpoint: Path, prompt: Path
) -> None:
    flags = ["--private", f"--model={checkpoint}", f"--prompt-file={prompt}", "--context=4096", "--new-tokens=3400"]
    with nothing_left(home):
        generation = terminal(headgate("generate", *flags))
        generation.wait_for(" w")  # the first words are out
        assert generation.end(END_S, pressing=CTRL_C) == 130, generation.text
        assert generation.last_line == "headgate: interrupted"
        assert_quiet(generation.text)


def daemon(home: Path) -> list[str]:
    sockets = [f"--socket={home}/store.sock", f"--broker={home}/broker.sock"]
    return kvstored(f"--data-dir={home}/data", "--dram-bytes=16MiB", "--metrics-addr=127.0.0.1:0", *sockets)


@pytest.mark.timeout(60)
def test_ctrl_c_while_the_daemon_starts(home: Path, terminal: StartTerminal) -> None:
    with nothing_left(home, "data"):
        starting = terminal(daemon(home))
        deadline = time.monotonic() + 30.0
        while not (home / "data" / "lock").exists():
            assert time.monotonic() < deadline
        starting.press(CTRL_C)
        assert starting.end(END_S) == 0, starting.text
        assert_quiet(starting.text)


@pytest.mark.timeout(60)
def test_a_second_ctrl_c_ends_the_draining(home: Path, terminal: StartTerminal) -> None:
    with nothing_left(home, "data"):
        serving = terminal(daemon(home))
        serving.wait_for("kvstored ready")
        with StoreClient.connect(f"{home}/store.sock", f"{home}/broker.sock") as client:
            client.open_session(LAYOUT, 1024)
            serving.press(CTRL_C)
            serving.wait_for("draining")
            pressed_s = time.monotonic()
            serving.press(CTRL_C)
            serving.wait_for("ended")
            assert time.monotonic() - pressed_s < 2.5, "it would have drained for 3 s"
        assert serving.end(END_S) == 0
        assert_quiet(serving.text)
