"""The benchmark of quantised records at its smallest size has all figures."""

import pytest

from bench import quantised
from bench.quantised import KINDS, QUANTISED, Settings
from tests.test_bench import SMALL, printed


@pytest.mark.timeout(180)
def test_all_parts(capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(
        tokens=512, steps=1, repeats=1, shape=SMALL, document_tokens=1024, questions=2, compared=1, dram_share=1.0
    )
    shown = {figure["name"]: figure for figure in printed(quantised.measure(settings, quantised.PARTS), capsys)}
    for kind in QUANTISED:
        assert shown[f"accuracy.{kind}"]["rival"] == "bfloat16"
        assert {
            f"kl.{kind}",
            f"same_token.{kind}",
            f"nvme_read_bytes.{kind}.disk.miss",
            f"quantised_step_ratio.{kind}",
        } < set(shown)
        for at in ("dram.hit", "dram.miss", "disk.miss"):
            assert shown[f"step_ms.{kind}.{at}"]["rival"] == "bfloat16"
            assert shown[f"quantised_step_ratio.{kind}.{at}"]["value"] > 0
    moved = [shown[f"moved_bytes.{kind}.dram.miss"]["value"] for kind in ("bfloat16", *QUANTISED)]
    assert len(moved) == len(KINDS)
    assert moved == sorted(moved, reverse=True)
