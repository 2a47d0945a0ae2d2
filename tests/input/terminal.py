"""A command in a terminal of its own, and what it leaves behind."""

import contextlib
import ctypes
import fcntl
import os
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
PR_SET_CHILD_SUBREAPER = 36
CTRL_C = b"\x03"


def environment(home: Path, **variables: str) -> dict[str, str]:
    """This process's, with temporary files and sockets under `home` and no settings of ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HEADGATE_", "KVSTORE_"))}
    own = {"TMPDIR": str(home), "XDG_RUNTIME_DIR": str(home), "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    return kept | own | variables


def headgate(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "decode_worker.cli", *arguments]


def kvstored(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvstore_service.daemon.server", *arguments]


class Terminal:
    """Runs `command` as a shell would in a terminal: Ctrl-C reaches every process of its foreground group."""

    def __init__(self, command: list[str], home: Path, **variables: str) -> None:
        self._screen, inside = os.openpty()
        self._shown = select.poll()  # select() takes no descriptor beyond 1,023
        self._shown.register(self._screen, select.POLLIN)
        modes = termios.tcgetattr(inside)
        modes[3] = modes[3] & ~termios.ECHO | termios.NOFLSH  # keys are not shown, and drop nothing that is
        termios.tcsetattr(inside, termios.TCSANOW, modes)
        self.text = ""
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(home, **variables), stdin=inside, stdout=inside, stderr=inside,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(inside)

    def wait_for(self, words: str, within_s: float = 60.0) -> None:
        """Returns when the screen has shown `words`."""
        deadline = time.monotonic() + within_s
        while words not in self.text:
            assert self._read(0.05), f"ended without {words!r}: {self.text!r}"
            assert time.monotonic() < deadline, f"no {words!r} within {within_s} s: {self.text!r}"

    def press(self, keys: bytes) -> None:
        os.write(self._screen, keys)

    def end(self, within_s: float = 30.0, pressing: bytes = b"") -> int:
        """The exit status; `pressing` again and again until then."""
        deadline = time.monotonic() + within_s
        while self.process.poll() is None:
            self.press(pressing)
            self._read(0.05)
            assert time.monotonic() < deadline, f"still runs after {within_s} s: {self.text!r}"
        while self._read(0.0):
            pass
        return self.process.returncode

    @property
    def last_line(self) -> str:
        """Without what moves the cursor."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text).strip().splitlines()[-1].strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        os.close(self._screen)

    def _read(self, within_s: float) -> bool:
        """False when nothing will come any more."""
        if self._shown.poll(within_s * 1000):
            try:
                self.text += os.read(self._screen, 1 << 16).decode(errors="replace")
            except OSError:  # the last process that had the terminal is gone
                return False
            return True
        return self.process.poll() is None


@contextlib.contextmanager
def nothing_left(home: Path, *kept: str, within_s: float = 10.0) -> Iterator[None]:
    """Checks that the block leaves no process, no shared memory, and under `home` no file but `kept`.

    Orphans become children of this process meanwhile, so none of them is missed."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    shared = set(os.listdir("/dev/shm"))
    before = set(psutil.Process().children(recursive=True))
    try:
        yield
        deadline = time.monotonic() + within_s
        while left := _left(home, kept, shared, before):
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.05)
    finally:
        for process in set(psutil.Process().children(recursive=True)) - before:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for orphan in set(psutil.Process().children()) - before:
            with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
                os.waitpid(orphan.pid, 0)
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def alive(before: set[psutil.Process]) -> list[psutil.Process]:
    """Descendants of this process that are neither zombies nor among `before`."""
    found = []
    for process in set(psutil.Process().children(recursive=True)) - before:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _left(home: Path, kept: tuple[str, ...], shared: set[str], before: set[psutil.Process]) -> list[str]:
    files = [str(path) for path in home.rglob("*") if path.relative_to(home).parts[0] not in kept]
    return [*map(str, alive(before)), *sorted(set(os.listdir("/dev/shm")) - shared), *files]


def run(command: list[str], home: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs a command without a terminal to its end."""
    return subprocess.run(
        command, cwd=ROOT, env=environment(home, **variables), capture_output=True, text=True, timeout=60, check=False
    )
