"""The benchmarks of a part of the KV in DRAM, at their smallest size: names, rivals, and what cannot be otherwise."""

import shutil

import pytest

from bench import demo, dram
from tests.test_bench import SMALL, printed


def test_every_part_of_the_tier_has_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    settings = dram.Settings((100, 50, 25), (0.05, 0.1), shape=SMALL, tokens=12288, steps=2, repeats=2, later_steps=2)
    shown = {figure["name"]: figure for figure in printed(dram.measure(settings, dram.PARTS), capsys)}
    for budget in ("5", "10"):
        assert 0.6 < shown[f"hit_ratio.{budget}"]["value"] < 0.9
        for percent in ("50", "25"):
            assert shown[f"dram_step_ms.{percent}.{budget}"]["rival"] == "all in DRAM"
            assert (shown[f"dram{percent}_share.{budget}"]["value"] is None) == (shutil.which("fio") is None)
            assert shown[f"dram_read_per_moved.{percent}.{budget}"]["value"] >= 0
    assert shown["first_step_ratio.100"]["runs"] == shown["first_step_ratio.25"]["runs"] == 2
    assert shown["shared_step_ratio.2"]["value"] > 0
    assert 0 < shown["checksum_share.cold.25"]["value"] < 1
    assert 0 <= shown["checksum_share.decode.25"]["value"] < 1, "DRAM may hold all that misses want"


def test_the_demo_stands_beside_the_store_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {f["name"]: f for f in printed(demo.measure(demo.Settings(2048, 4, of_a_round=2, dram=0.9)), capsys)}
    assert set(shown) == {*demo.SPEEDUPS.values(), *(f"demo_tokens_per_s.{name}" for name in demo.STORES)}
    assert all(figure["runs"] == 2 and figure["value"] > 0 for figure in shown.values())
