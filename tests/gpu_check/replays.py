"""Very many replays under a daemon that answers late and in any order: the bits of the run that was not disturbed."""

from __future__ import annotations

import time

import torch

from decode_worker.engine.engine import Engine
from tests.gpu_check.report import Report
from tests.gpu_check.scale import ALWAYS_MISS
from tests.gpu_check.scene import Scene, stepped

PROMPT, TOKENS = 31, 32  # seeds
SAID_S = 10.0


def run(report: Report, scene: Scene) -> None:
    scale = scene.scale
    with report.check(f"{scale.replays} replays with random delays") as check, scene.daemon(faulty=True) as daemon:
        with scene.engine(daemon, **ALWAYS_MISS) as engine:
            ids = scene.random_ids(scale.prompts[0], PROMPT)
            engine.close_session(engine.prefill(ids)[0])
            undisturbed, started, said, cycles = _cycle(engine, scene, ids), time.monotonic(), 0.0, 0
            scene_replays = _replays(scene)
            while _replays(scene) - scene_replays < scale.replays:
                cycles += 1
                daemon.set_faults(delay_us=scale.delay_us, delay_random=True, reorder=True, seed=cycles)
                seen = _cycle(engine, scene, ids)
                different = (seen != undisturbed).any(-1).nonzero()
                assert not len(different), f"cycle {cycles} has other logits from step {int(different[0])} on"
                spent = time.monotonic() - started
                check.figures |= {"replays": _replays(scene) - scene_replays, "seconds": spent}
                if spent - said > SAID_S:
                    said = spent
                    print(f"          {check.figures['replays']} replays in {spent:.0f} s", flush=True)
            counters = engine.policy.counters
            assert counters.records_moved > 0, "nothing was ever fetched"
            assert counters.errors == counters.stale == 0, f"{counters.errors} errors, {counters.stale} stale sets"
        check.detail = f"{check.figures['replays']} in {check.figures['seconds']:.0f} s, always the same bits"


def _cycle(engine: Engine, scene: Scene, ids: list[int]) -> torch.Tensor:
    """Logits of the same steps behind the stored prompt. Index and graphs outlive a session."""
    session, rest = engine.attach(ids, growth=scene.scale.cycle)
    tokens = [*rest, *scene.random_ids(scene.scale.cycle, TOKENS)]
    seen = torch.stack([stepped(engine, [session], [token])[0] for token in tokens])
    engine.close_session(session)
    return seen


def _replays(scene: Scene) -> int:
    return sum(graph.replays for graph in scene.graphs)
