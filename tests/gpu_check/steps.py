"""The whole step on the device beside the CPU engine: the same weights, prompts and tokens, over a real daemon."""

from __future__ import annotations

import torch

from tests.gpu_check.report import Check, Report
from tests.gpu_check.scene import Decoded, Scene, decoded
from tests.support.daemon_process import Daemon

TOLERANCE = 1e-2  # of the largest logit
COUNTS = ("lookups", "hits", "records_moved")
COUNTS_TOLERANCE = 0.01  # a sum that rounds otherwise may turn a bit of a code
VARIANTS: dict[str, dict[str, str]] = {
    "the host waits before each layer": {"sync": "layer"},
    "launch by launch": {"graph": "off"},
    "bfloat16 in the store": {"storage": "bfloat16"},
}
PREFILLED = 77


def run(report: Report, scene: Scene) -> None:
    with report.check("prefill") as check:
        _prefill(scene, check)
    first, *_ = scene.scale.presets
    with scene.daemon() as daemon:
        right = {}
        for preset in scene.scale.presets:
            with report.check(f"{preset} on the CPU"), scene.engine(daemon, "cpu", policy=preset) as engine:
                right[preset] = decoded(engine, scene)
        for window in scene.device.windows:
            for preset in right:
                with report.check(f"{preset} {window}") as check:
                    _compare(scene, daemon, check, right[preset], window=window, policy=preset)
        for name, settings in VARIANTS.items():
            with report.check(f"{first}, {name}") as check:
                with scene.engine(daemon, "cpu", policy=first, **settings) as engine:
                    expected = decoded(engine, scene)
                _compare(scene, daemon, check, expected, policy=first, **settings)


def _prefill(scene: Scene, check: Check) -> None:
    """Each over a store of its own: what one has computed the other would read."""
    ids, logits = scene.random_ids(max(scene.scale.prompts), PREFILLED), {}
    for kernels in ("cpu", "triton"):
        with scene.daemon() as daemon, scene.engine(daemon, kernels) as engine:
            logits[kernels] = engine.prefill(ids)[1]
    check.figures["difference"] = _difference(logits["triton"], logits["cpu"])


def _compare(scene: Scene, daemon: Daemon, check: Check, right: Decoded, **settings: str) -> None:
    with scene.engine(daemon, **settings) as engine:
        scene.graphs.clear()  # what the window was tried with
        mine = decoded(engine, scene, right.tokens)
        window = type(engine.transport.window).__name__
    replays = sum(graph.replays for graph in scene.graphs)
    difference = _difference(mine.logits, right.logits)
    counts = {name: (getattr(mine.counters, name), getattr(right.counters, name)) for name in COUNTS}
    check.figures |= {"window": window, "difference": difference, "replays": replays, "counts": counts}
    check.detail = f"{window}, {difference:.1e} of the largest logit, {replays} replays"
    for name, (a, b) in counts.items():
        assert abs(a - b) <= COUNTS_TOLERANCE * max(a, b), f"{name}: {a}, on the CPU {b}"
    assert (replays > 0) == (settings.get("graph") != "off"), f"{replays} replays"
    assert all(graph.replays for graph in scene.graphs), "a line could not be captured"


def _difference(mine: torch.Tensor, right: torch.Tensor) -> float:
    """The largest, of the largest logit. AssertionError beyond TOLERANCE, or if a likeliest token is another one."""
    assert torch.isfinite(mine).all(), "logits are not finite"
    difference = float((mine - right).abs().max() / right.abs().max())
    assert difference <= TOLERANCE, f"logits differ by {difference:.1e} of the largest"
    best = right.topk(2, dim=-1).values
    clear = best[..., 0] - best[..., 1] > 2 * TOLERANCE * right.abs().max()
    assert torch.equal(mine.argmax(-1)[clear], right.argmax(-1)[clear]), "another token is the likeliest"
    return difference
