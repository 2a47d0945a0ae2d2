"""A daemon of one's own: a child process with private sockets that ends with its parent."""

import contextlib
import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstore_service.shared.scratch import Scratch, for_sockets
from kvstore_service.shared.types import StoreError

DAEMON_ARGV = (sys.executable, "-m", "kvstore_service.daemon.server")
DRAIN_S = 3.0
PARENT_BYTES_MAX = 107 - len("/headgate-run-xxxxxxxx/broker.sock")
_PR_SET_PDEATHSIG = 1


class PrivateDaemon:
    """Starts `argv` (kvstored by default) over `data_dir` and waits until it serves.

    `socket` and `broker` are what a client connects to; `ready` holds the fields of the ready line. The child gets
    SIGTERM when the *thread* that called `start` ends, also if its process is killed: start it from the main thread.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        dram_bytes: int | str = "256MiB",
        *,
        options: Sequence[str] = (),
        argv: Sequence[str] = DAEMON_ARGV,
        start_s: float = 30.0,
        stop_s: float = 15.0,
    ) -> None:
        """`options` are further flags of kvstored, such as `--nvme-bytes=1GiB`."""
        self.data_dir = Path(data_dir)
        self._dram_bytes = dram_bytes
        self._options = tuple(options)
        self._argv = tuple(argv)
        self._start_s = start_s
        self._stop_s = stop_s
        self._scratch = Scratch("headgate-run", for_sockets(PARENT_BYTES_MAX))
        self.run_dir = self._scratch.path
        self.socket = str(self.run_dir / "store.sock")
        self.broker = str(self.run_dir / "broker.sock")
        self.log_path = self.run_dir / "kvstored.log"
        self.ready: dict[str, str] = {}
        self.process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str | None] = queue.Queue()

    @property
    def pid(self) -> int:
        if self.process is None:
            raise StoreError("FAILED_PRECONDITION", "the daemon is not running")
        return self.process.pid

    def spawn(self) -> None:
        """Starts the process without waiting for it."""
        command = (
            *self._argv,
            f"--data-dir={self.data_dir}",
            f"--socket={self.socket}",
            f"--broker={self.broker}",
            f"--dram-bytes={self._dram_bytes}",
            "--metrics-addr=127.0.0.1:0",
            f"--drain-s={DRAIN_S}",
            *self._options,
        )
        tethered = (sys.executable, "-m", "kvstore_service.client.private", str(os.getpid()), *command)
        self._lines = queue.Queue()
        with self.log_path.open("a") as log:
            # In a process group of its own: a terminal's Ctrl-C is for the parent, which then stops it in order.
            self.process = subprocess.Popen(
                tethered, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1,
                process_group=0,
            )  # fmt: skip
        reader = threading.Thread(target=_read_lines, args=(self.process, self._lines), daemon=True)
        reader.start()

    def start(self) -> Self:
        self.spawn()
        self.wait_ready(self._start_s)
        return self

    def wait_ready(self, timeout_s: float) -> None:
        """Returns when the ready line has been printed; StoreError with the log's end otherwise."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self.read_line(deadline - time.monotonic())
            except StoreError as error:
                self.kill()
                raise StoreError(error.code, f"kvstored did not start: {error.message}\n{self.log_tail()}") from error
            if line.startswith("kvstored ready"):
                self.ready = dict(field.split("=", 1) for field in line.split() if "=" in field)
                return

    def read_line(self, timeout_s: float = 10.0) -> str:
        """The next line of the child's stdout. UNAVAILABLE if it ended, DEADLINE_EXCEEDED if it is silent."""
        try:
            line = self._lines.get(timeout=max(timeout_s, 0.001))
        except queue.Empty:
            raise StoreError("DEADLINE_EXCEEDED", f"no line within {timeout_s:.1f} s") from None
        if line is None:
            raise StoreError("UNAVAILABLE", "the daemon ended")
        return line.rstrip("\n")

    def send_line(self, line: str) -> None:
        """Writes a line to the child's stdin, for entries that listen there."""
        if self.process is None or self.process.stdin is None:
            raise StoreError("FAILED_PRECONDITION", "the daemon is not running")
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def log_tail(self, lines: int = 20) -> str:
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])
        return ""

    def stop(self) -> int | None:
        """SIGTERM, then SIGKILL after `stop_s`. Returns the exit status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int | None:
        """SIGKILL, as a crash."""
        return self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int | None:
        process, self.process = self.process, None
        if process is None:
            return None
        process.send_signal(number)
        try:
            process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(self._stop_s)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return process.returncode

    def close(self) -> None:
        """Stops the daemon and removes its sockets; the data directory stays."""
        self.stop()
        self._scratch.close()

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_lines(process: "subprocess.Popen[str]", lines: "queue.Queue[str | None]") -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError, OSError):
        for line in process.stdout:
            lines.put(line)
    lines.put(None)


def _tether(parent_pid: int, command: Sequence[str]) -> None:
    """Asks for SIGTERM at the parent's death, then becomes `command`. The kernel keeps the request over exec."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)
    os.execv(command[0], list(command))


if __name__ == "__main__":
    _tether(int(sys.argv[1]), sys.argv[2:])
