"""An engine in a process of its own, which answers in JSON lines: its memory around a prefill, then every token.

echo '{"config": {"model": ...}, "prompt": [1, 2], "steps": 3}' | python -m tests.e2e.worker_process
"""

import json
import sys
from contextlib import closing
from pathlib import Path

from decode_worker.config import WorkerConfig
from decode_worker.engine.engine import Engine


def main() -> None:
    order = json.loads(sys.stdin.readline())
    with closing(Engine(WorkerConfig(**order["config"]))) as engine:
        engine.compute_only(order["prompt"][:64])  # threads and workspaces of the libraries are there before
        before = resident_bytes()
        session, logits = engine.prefill(order["prompt"])
        say(
            before_bytes=before,
            after_bytes=resident_bytes(),
            device_bytes=session.geometry.device_bytes,
            index_bytes=engine.index_bytes(session),
            offloaded_bytes=session.geometry.offloaded_bytes(session.stored),
        )
        for _ in range(order["steps"]):
            token = int(logits.argmax())
            say(token=token)
            logits = engine.step([session], [token])[0]
        engine.close_session(session)


def resident_bytes() -> int:
    """Physical memory of this process, shared pages included."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/self/status has no VmRSS")


def say(**line: int) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
