"""One part in a process of its own.

    python -m tests.gpu_check.child PART --report FILE [--seconds S] [--least] [--rehearse]

A fault of the device ends the process that met it, and its context with it: the next part begins with a new one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.gpu_check.parts import PARTS
from tests.gpu_check.report import Report
from tests.gpu_check.scale import DEVICE, REHEARSED
from tests.gpu_check.scene import Scene, on_a_device

PARTS_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--report", type=Path, required=True, help="a line of JSON for each check goes there")
    parser.add_argument("--seconds", type=float, default=PARTS_S, help="after which it is ended (default %(default)s)")
    parser.add_argument("--least", action="store_true", help="the shapes of a rehearsal, on the device")
    parser.add_argument("--rehearse", action="store_true", help="on a pretended GPU; TRITON_INTERPRET must be set")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    faulthandler.enable()
    with (
        tempfile.TemporaryDirectory(prefix="headgate-gpu-") as directory,
        _scene(Path(directory), arguments) as scene,
    ):
        scene.deadline = deadline
        PARTS[arguments.part].load()(Report(arguments.report), scene)


@contextlib.contextmanager
def _scene(directory: Path, arguments: argparse.Namespace) -> Iterator[Scene]:
    if arguments.rehearse:
        from tests.gpu_check.rehearsal import rehearsed

        with rehearsed(directory) as scene:
            yield scene
        return
    with on_a_device(directory, REHEARSED if arguments.least else DEVICE) as scene:
        yield scene


if __name__ == "__main__":
    main()
