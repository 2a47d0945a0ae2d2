"""The ablation of the tiers at its smallest size: every part stands beside `token`, and counts are in order."""

from collections.abc import Sequence

import pytest

from bench import ablation
from bench.ablation import RIVAL, STEPS, UNITS
from tests.test_bench import SMALL, printed


@pytest.mark.parametrize(
    ("trace", "tokens", "steps"),
    [("demo", 2048, ("token", "pack", "learnt")), ("drifting", 4096, ("token", "pack", "gaps", "seed", "lookahead"))],
)
def test_every_part_has_its_figures(
    trace: str,
    tokens: int,
    steps: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ablation, "STEPS", {step: STEPS[step] for step in steps})
    settings = ablation.Settings(tokens=tokens, dram=0.9, questions=6, shape=SMALL, decoded=8, budget=0.1)
    shown = {figure["name"]: figure for figure in printed(ablation.measure(settings, [trace]), capsys)}
    assert list(shown) == [f"{of}.{trace}.{step}" for step in steps for of in UNITS]
    for step in steps:
        found = {of: shown[f"{of}.{trace}.{step}"] for of in UNITS}
        if found["read_per_moved"]["value"] is None:
            assert (trace, step) == ("drifting", "seed")  # there was no prompt
            continue
        value = {of: figure["value"] for of, figure in found.items()}
        assert value["floor"] <= value["blocks_per_moved"]
        assert value["useful_per_moved"] <= value["read_per_moved"]
        assert value["wait_ms"] <= value["step_ms"]
        assert value["blocks_per_moved"] >= 1
        assert found["blocks_per_moved"]["rival"] == (None if step == RIVAL else RIVAL)
    for step in ("token", "pack"):
        assert shown[f"useful_per_moved.{trace}.{step}"]["value"] == shown[f"read_per_moved.{trace}.{step}"]["value"]
    assert shown[f"blocks_per_moved.{trace}.pack"]["ratio"] < 1
