"""kvstored with a lever: reads JSON lines from stdin.

It runs on the test build of kvstore_service._native that `--native=PATH`, its first flag, names. An object goes to
copy_shim_set and an array to io_shim_set; both are answered with `ok`, "disk" with io_shim_counts, and "trace" with the
rows of DataPlane.drain_trace.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore_service.daemon.config import Config
    from kvstore_service.daemon.server import Daemon


def faulty(config: Config) -> Daemon:
    from kvstore_service.daemon.server import Daemon

    daemon = Daemon(config)
    threading.Thread(target=_obey, args=(daemon,), daemon=True).start()
    return daemon


def _obey(daemon: Daemon) -> None:
    from kvstore_service import _native

    for line in sys.stdin:
        try:
            message = json.loads(line)
            if message == "trace":
                print(json.dumps(daemon.data_plane.drain_trace().tolist()), flush=True)
                continue
            if message == "disk":
                print(json.dumps(_native.io_shim_counts()), flush=True)
                continue
            if isinstance(message, list):
                _native.io_shim_set([tuple(rule) for rule in message])
            else:
                _native.copy_shim_set(**message)
            print("ok", flush=True)
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            print(f"refused: {error}", flush=True)


def load_native(path: str) -> None:
    """Puts the build at `path` in the place of the installed one, before anything imports that."""
    name = "kvstore_service._native"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


if __name__ == "__main__":
    arguments = sys.argv[1:]
    load_native(arguments.pop(0).removeprefix("--native="))
    from kvstore_service.daemon.server import main

    sys.exit(main(arguments, make=faulty))
