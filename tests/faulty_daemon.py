"""kvstored with a lever: reads JSON lines from stdin, passes them to DataPlane.set_faults, answers `ok`."""

import json
import sys
import threading

from kvstore_service.config import Config
from kvstore_service.server import Daemon, main


def faulty(config: Config) -> Daemon:
    daemon = Daemon(config)
    threading.Thread(target=_obey, args=(daemon,), daemon=True).start()
    return daemon


def _obey(daemon: Daemon) -> None:
    for line in sys.stdin:
        try:
            daemon.data_plane.set_faults(**json.loads(line))
            print("ok", flush=True)
        except (TypeError, ValueError) as error:
            print(f"refused: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main(make=faulty))
