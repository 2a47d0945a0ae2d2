"""Every benchmark at its smallest size: figures in the common form, with their rivals. Nothing is said about speed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gather, isolation, nvme, products, ring, scale, step
from bench.checkpoint import B8
from decode_worker.figures import Figure, print_json

SMALL = B8 | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 64,
}
FIELDS = {"name", "value", "unit", "rival", "rival_value", "ratio", "runs", "min", "max"}


@pytest.fixture(autouse=True)
def threads() -> Any:
    """A benchmark sets torch's threads for its process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def printed(figures: Sequence[Figure], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The figures as `--json` shows them, after a check of the form."""
    capsys.readouterr()
    print_json(figures)
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == {"machine", "commit", "date", "command", "figures"}
    assert all(isinstance(shown[key], str) and shown[key] for key in ("machine", "commit", "date", "command"))
    for figure in shown["figures"]:
        assert set(figure) == FIELDS
        assert math.isfinite(figure["value"])
        assert figure["value"] >= 0
        assert figure["runs"] >= 1
        if figure["rival"] is not None:
            assert figure["rival_value"] > 0
            assert figure["ratio"] >= 0
    return shown["figures"]


def rivals(figures: Sequence[dict[str, Any]]) -> dict[str, set[str]]:
    """Figure -> what it was compared with; figures without a rival are left out."""
    found: dict[str, set[str]] = {}
    for figure in figures:
        if figure["rival"] is not None:
            found.setdefault(figure["name"], set()).add(figure["rival"])
    return found


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("cc")), reason="the rival is compiled when it runs")
def test_ring(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(ring.measure(rounds=20, repeats=1), capsys)
    assert rivals(shown) == {case.name: {case.rival} for case in ring.CASES}


def test_gather(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(gather.measure(tokens=2048, records=256, tickets=4, repeats=2), capsys)
    others = {"torch.index_select", "numpy fancy indexing", "memcpy"}
    assert rivals(shown) == {"gather_random": others, "gather_clustered": others}
    assert all(figure["runs"] == 2 for figure in shown)


def test_nvme(capsys: pytest.CaptureFixture[str]) -> None:
    figures = nvme.measure(Path("/var/tmp"), tokens=8192, reads=32, tickets=8, repeats=1, depth=8)
    others = {"liburing in Python", "pread threads"}
    assert rivals(printed(figures, capsys)) == {"cold_scattered_4k": others, "cold_clustered_16k": others}


def test_isolation(capsys: pytest.CaptureFixture[str]) -> None:
    """What is measured is there; how much it is, a busy machine decides."""
    few = isolation.Settings(
        repeats=1, seconds=0.1, rounds=20, bulk_passes=1, cold_reads=1, unbinds=1, range_mib=8, attack_s=0.1
    )
    shown = printed(isolation.measure(few), capsys)
    names = {figure["name"] for figure in shown} - {"hot_p99_us.slow_disk"}  # where there is such a build
    assert names == {
        "hot_p99_us.alone", "hot_p99_us.flood", "hot_p99_us.cold_neighbour",
        "hot_p99_us.rebinding_neighbour", "victim_share.one_ring",
        "victim_share.8_rings", "victim_share.64_rings", "unbind_ms.flood", "cold_read_ms.behind_range",
        "range_gbps.8192_runs", "range_gbps.8192_runs.share", "rss_excess_mib.sparse_ring",
        "rss_excess_mib.cold_ticket", "rss_excess_mib.many_runs",
    }  # fmt: skip


def test_scale(tmp_path: Path) -> None:
    """It looks up every row that it made, and removes all it made."""
    figures = {figure.name: figure.value for figure in scale.measure(tmp_path, [scale.CHAIN, 2 * scale.CHAIN], 4, 9)}
    sizes = (scale.CHAIN, 2 * scale.CHAIN)
    assert set(figures) == {
        *(f"{name}.{size}" for name in ("start_s", "lookup_ms", "chain128_ms", "commit_ms") for size in sizes),
        "lookup_growth", "chain128_growth", "commit_growth", "rss_bytes_per_pack", "refusals.4_workers_9_sessions",
    }  # fmt: skip
    assert figures["refusals.4_workers_9_sessions"] == 0
    assert not list(tmp_path.iterdir())


def test_step(capsys: pytest.CaptureFixture[str]) -> None:
    settings = step.Settings(
        (2048,), steps=5, repeats=2, threads=1, stream_bytes=1 << 20, dram_bytes=4 << 20, shape=SMALL
    )
    shown = printed(step.measure(settings), capsys)
    whole = {"transformers StaticCache", "torch matmul"}
    expected = {f"{case}_2k": whole | ({"full"} if case != "full" else set()) for case in step.CASES}
    assert rivals(shown) == {**expected, "full_2k.attend_read": {"stream read"}}
    value = {figure["name"]: figure["value"] for figure in shown}
    assert value["kv_2k"] == 2048 * 3 * 2 * 256
    assert value["qsac_hit_2k.hit_ratio"] == 1
    assert value["qsac_hit_2k.moved"] == 0
    assert value["qsac_miss_2k.hit_ratio"] == 0
    assert value["qsac_miss_2k.moved"] > 0


def test_step_refuses_what_it_cannot_measure() -> None:
    with pytest.raises(ValueError, match="seal tails"):
        step.Settings(steps=100, repeats=3)
    with pytest.raises(ValueError, match="multiples of 256"):
        step.Settings(contexts=(1000,))


def test_products(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = {"b8": {**SMALL, "model_type": "llama", "rms_norm_eps": 1e-5}}
    settings = products.Settings(
        (1, 5), steps=2, repeats=2, threads=1, stream_bytes=1 << 20, compared_tokens=40, shapes=shapes
    )
    shown = printed(products.measure(settings), capsys)
    kinds = [f"b8.{weights}" for weights in ("compute", "int8")]
    assert rivals(shown) == {
        **{f"{kind}.rows{rows}": {"torch", "weights' bytes"} for kind in kinds for rows in (1, 5)},
        **{f"{kind}.kept": {"weights"} for kind in kinds},
        **{f"{name}.int8.{what}": {"bfloat16"} for name in ("b8", "retriever") for what in ("difference", "top1")},
    }
    value = {figure["name"]: figure["value"] for figure in shown}
    matrices = 3 * (64 * (4 + 2 * 2) * 64 + 4 * 64 * 64 + 3 * 64 * 96)
    assert value["b8.weights"] == 2 * (matrices + 512 * 64)
    assert value["b8.compute.kept"] == 0
    assert value["b8.int8.kept"] == matrices
    assert value["retriever.int8.top1"] > 95
