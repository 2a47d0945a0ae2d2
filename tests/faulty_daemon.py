"""kvstored with a lever: reads JSON lines from stdin.

An object goes to DataPlane.set_faults and is answered with `ok`; "trace" with the rows of DataPlane.drain_trace.
"""

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
            message = json.loads(line)
            if message == "trace":
                print(json.dumps(daemon.data_plane.drain_trace().tolist()), flush=True)
                continue
            daemon.data_plane.set_faults(**message)
            print("ok", flush=True)
        except (TypeError, ValueError) as error:
            print(f"refused: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main(make=faulty))
