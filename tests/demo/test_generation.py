"""The generation at the demo's smallest size: all policies, what they held and moved. Nothing is said about speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.document import scratch
from decode_worker.config import WorkerConfig
from decode_worker.demo import generation
from decode_worker.demo.curve import figures, print_curve
from decode_worker.demo.generation import ALWAYS_SELECTS, FULL, POLICIES, Result, measure
from decode_worker.synthetic.checkpoint import B8

CONTEXT = 8192
SMALL = B8 | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 64}
CONFIG = WorkerConfig(model=Path(), wait_ms=20_000)


@pytest.fixture(scope="module")
def results() -> list[Result]:
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch, scratch() as directory:
        patch.setattr(generation, "ROOM_BYTES", 1 << 20)  # so that the DRAM tier is what the KV needs
        found = measure(Path(directory), CONTEXT, CONFIG, pytest.fail, SMALL)
        assert [path.name for path in Path(directory).iterdir()] == ["model"]
    torch.set_num_threads(threads)
    return found


def test_every_policy_generates_from_memory(results: list[Result]) -> None:
    assert tuple(result.policy for result in results) == POLICIES
    for result in results:
        assert len(result.ms) == generation.ROUNDS
        assert result.nvme_read_bytes == 0


def test_what_is_held_and_attended(results: list[Result]) -> None:
    by_policy = {result.policy: result for result in results}
    full, always, sparse = by_policy[FULL], by_policy[ALWAYS_SELECTS], by_policy["qsac"]
    assert (full.attended, full.moved, full.footprint.offloaded_heads) == (1, 0, 0)
    assert full.footprint.device_share == 1
    for result in (always, sparse):
        # A tenth is selected; 4 sinks and the tail come on top.
        assert CONFIG.budget < result.attended < CONFIG.budget + 0.1
        assert result.footprint.offloaded_heads == 2 * (SMALL["num_hidden_layers"] - 1)
    assert always.hit_ratio == 0
    assert 0 < sparse.hit_ratio < 1
    assert 0 < sparse.moved < always.moved


def test_device_share_counts_the_index(results: list[Result]) -> None:
    footprint = results[-1].footprint
    without = replace(footprint, index_bytes=0)
    assert footprint.device_share - without.device_share == pytest.approx(
        footprint.index_bytes / footprint.offloaded_bytes
    )


def test_figures_name_their_rivals(results: list[Result], capsys: pytest.CaptureFixture[str]) -> None:
    found = {figure.name: figure for figure in figures(results)}
    for policy in POLICIES[1:]:
        assert found[f"generation.8k.{policy}"].rival == FULL
        assert found[f"generation.8k.{policy}.records_moved"].rival == ALWAYS_SELECTS
        assert found[f"generation.8k.{policy}.held_bytes"].ratio < 1
    assert found["generation.8k.nvme_read_bytes"].value == 0
    print_curve(results)
    shown = capsys.readouterr().out
    assert all(policy in shown for policy in POLICIES)
    assert "random weights" in shown


def test_a_context_without_room_is_left_out_and_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generation, "memory_available", lambda: 1 << 20)
    said: list[str] = []
    assert measure(tmp_path, 8192, CONFIG, said.append) == []
    assert len(said) == 1
    assert "8,192 tokens" in said[0]
    assert "of memory are needed, 1MiB are free" in said[0]
