"""A real kvstored for tests: `with Daemon(tmp_path) as daemon: StoreClient.connect(daemon.socket, daemon.broker, ...)`.

`start`, `stop` (drain), `kill` (crash), `spawn` + `wait_ready`, `restart`; `Daemon(..., faulty=True)` takes faults:
`daemon.set_faults(stopped=True)`. Limits and cleanup are PrivateDaemon's.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvstore_service.client.private import DAEMON_ARGV, PrivateDaemon
from tests.support import shim_build


def _faulty_argv(native: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.support.faulty_daemon", f"--native={native}")


class Daemon(PrivateDaemon):
    def __init__(
        self,
        directory: Path,
        dram_bytes: int | str = "64MiB",
        *,
        options: Sequence[str] = ("--nvme-bytes=1GiB", "--copy-threads=1"),
        faulty: bool = False,
        native: Path | None = None,
        prefix: Sequence[str] = (),
        start_s: float = 30.0,
    ) -> None:
        """Keeps its packs under `directory`/data. `faulty`: runs on the test build of the data plane, or on
        `native`; `prefix`: a command that runs the daemon's."""
        super().__init__(
            directory / "data",
            dram_bytes,
            options=options,
            argv=(*prefix, *(_faulty_argv(native or shim_build.path()) if faulty else DAEMON_ARGV)),
            start_s=start_s,
        )

    def restart(self) -> None:
        """Comes back over the same data and the same sockets, after `kill` or `stop`."""
        self.stop()
        self.start()

    def set_faults(self, **faults: bool | int) -> None:
        """copy_shim_set in the daemon's process; returns when they hold. Needs faulty=True."""
        self.send_line(json.dumps(faults))
        answer = self.read_line(10.0)
        assert answer == "ok", answer

    def set_disk_faults(self, *rules: tuple[str, str, int, int, int]) -> None:
        """io_shim_set in the daemon's process; returns when they hold. Needs faulty=True."""
        self.send_line(json.dumps(rules))
        answer = self.read_line(10.0)
        assert answer == "ok", answer

    def disk_counts(self) -> dict[str, tuple[int, int]]:
        """{site: (operations, of them with a fault)} since the last `set_disk_faults`."""
        self.send_line(json.dumps("disk"))
        return {site: (operations, faults) for site, (operations, faults) in json.loads(self.read_line(10.0)).items()}

    def drain_trace(self) -> list[list[int]]:
        """DataPlane.drain_trace in the daemon's process. Needs faulty=True."""
        self.send_line(json.dumps("trace"))
        rows: list[list[int]] = json.loads(self.read_line(10.0))
        return rows

    def open_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))
