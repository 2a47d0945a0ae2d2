"""A daemon that is killed while a replay waits for it: an error within the deadline, and the next daemon serves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from decode_worker import _native
from tests.gpu_check.report import Report
from tests.gpu_check.scale import ALWAYS_MISS
from tests.gpu_check.scene import Scene, stepped

PROMPT = 97
WARM = 3  # made launch by launch, captured, replayed
DELAY_US = 200_000  # of each run, so that the daemon dies within a replay
KILL_S = 0.05


def run(report: Report, scene: Scene) -> None:
    for window in scene.device.windows:
        with report.check(f"killed within a replay, {window}") as check:
            check.figures["error_s"] = seconds = _killed(scene, window)
            check.detail = f"an error after {seconds:.2f} s of {scene.scale.wait_ms / 1000:.1f}"


def _killed(scene: Scene, window: str) -> float:
    """Seconds from the step's beginning to its error."""
    scale = scene.scale
    with scene.daemon(faulty=True) as daemon:
        settings = {**ALWAYS_MISS, "wait_ms": scale.wait_ms, "window": window}
        with scene.engine(daemon, **settings) as engine:
            session, _ = engine.prefill(scene.random_ids(scale.prompts[0], PROMPT), growth=2 * WARM)
            for token in range(WARM):
                stepped(engine, [session], [token])
            daemon.set_faults(delay_us=DELAY_US)
            threading.Timer(KILL_S, daemon.kill).start()
            started = time.monotonic()
            _raises(_native.RingTimeout, lambda: engine.step([session], [WARM]))
            seconds = time.monotonic() - started
            assert KILL_S < seconds < scale.wait_ms / 1000 + scale.margin_s, f"the error came after {seconds:.2f} s"
            _raises(_native.RingPoisoned, lambda: engine.step([session], [WARM]))
    with scene.daemon() as daemon, scene.engine(daemon, window=window) as engine:
        session, _ = engine.prefill(scene.random_ids(scale.prompts[0], PROMPT), growth=2 * WARM)
        for token in range(WARM):
            stepped(engine, [session], [token])
    return seconds


def _raises(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")
