"""Every benchmark at its smallest size: figures in the common form, with their rivals. Nothing is said about speed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import (
    comparison,
    decode,
    gather,
    gpu_facts,
    isolation,
    nvme,
    products,
    restore,
    ring,
    scale,
    sessions,
    store,
)  # fmt: skip
from bench.decoder import HITS
from bench.rivals import RIVALS, NotRun, Problem, llama_cpp
from decode_worker.figures import Figure, print_json
from decode_worker.synthetic.checkpoint import B8, Q05, Shape, random_checkpoint

SMALL = B8 | {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 64,
}
SMALL_QWEN2 = Q05 | {
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
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
        if figure["value"] is None:
            assert figure["unit"].startswith("not run: ")
            assert figure["runs"] == 0
            continue
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
    others = {"liburing in Python", "pread threads", "numpy.memmap"} | ({"fio"} if shutil.which("fio") else set())
    names = {"cold_scattered_4k", "cold_clustered_16k", "cold_long_64k"}
    assert rivals(printed(figures, capsys)) == dict.fromkeys(names, others)


@pytest.mark.skipif(not (shutil.which("gcc") or shutil.which("cc")), reason="rivals are compiled when they run")
def test_store(capsys: pytest.CaptureFixture[str]) -> None:
    """Every ratio is there by its name; without fio those that need it say so."""
    few = store.Settings(
        repeats=1, nvme_tokens=8192, nvme_tickets=4, depth=8, ingest_tokens=1024, gather_tokens=2048,
        gather_records=256, gather_tickets=4, rounds=20,
    )  # fmt: skip
    shown = printed(store.measure(few, store.PARTS), capsys)
    ratio = {figure["name"]: figure["value"] for figure in shown if figure["rival"] is None}
    of_fio = {"nvme_4k_vs_fio", "nvme_64k_vs_fio", "ingest_vs_disk"}
    assert set(ratio) == of_fio | {
        "nvme_vs_memmap_4k", "nvme_vs_memmap_64k", "gather_vs_bare.1", "gather_vs_bare.2",
        "ticket_hot_vs_pingpong", "ticket_hot_vs_lines",
    }  # fmt: skip
    assert {name for name, value in ratio.items() if value is None} == (set() if shutil.which("fio") else of_fio)


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


def few(**changes: Any) -> decode.Settings:
    return decode.Settings(
        contexts=(2048,), q05_contexts=(1024,), growth_contexts=(1024, 2048), growth_places=64,
        batch_context=1024, batches=(1, 3), prefill_tokens=1024, prefill_repeats=2, prefill_warm_tokens=64,
        million=3072, steps=2, repeats=2, threads=1, stream_bytes=1 << 20, shape=SMALL, q05=SMALL_QWEN2, **changes,
    )  # fmt: skip


def test_decode(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure is there by its name, with as many hits as its name says; what cannot be had has no value."""

    def absent(problem: Problem) -> None:
        raise NotRun("nobody has it")

    monkeypatch.setitem(RIVALS, "llama_cpp", absent)
    monkeypatch.setitem(comparison.PRESETS, "lru", comparison.Preset("no such policy", steered=True))
    shown = printed(decode.measure(few(), decode.PARTS), capsys)
    value = {figure["name"]: figure["value"] for figure in shown}
    assert len(value) == len(shown), "two figures have one name"
    rivals = {"static_cache", "matmul", "llama_cpp", "full", "infinigen", "litecache", "lru"}
    for kind, at in (("", "2k"), ("_q05", "1k")):
        assert {f"speedup{kind}.{at}.{hits}.{rival}" for hits in HITS for rival in rivals} <= value.keys()
        assert {f"{name}{kind}.{at}" for name in ("outside_ms", "python_ms", "full_read_share")} <= value.keys()
        assert value[f"hit_ratio{kind}.{at}.hit"] == 1
        assert 0.73 <= value[f"hit_ratio{kind}.{at}.hit75"] <= 0.8
        assert value[f"hit_ratio{kind}.{at}.miss"] == 0
        assert value[f"moved{kind}.{at}.hit"] == 0
        assert 0 < value[f"moved{kind}.{at}.hit75"] < value[f"moved{kind}.{at}.miss"]
        assert value[f"python_ms{kind}.{at}"] > 0
    read = {name: bytes_read for name, bytes_read in value.items() if name.startswith("nvme_read")}
    assert len(read) == 2 * len(HITS) + 2 * len(HITS) + 2 + len(HITS)  # two shapes, two contexts, two batches, the last
    assert not any(read.values()), "all KV lies in DRAM"
    assert {
        "growth_2k_vs_1k", "growth_2k_vs_1k.miss", "tokens_per_s.1k.batch1", "tokens_per_s.1k.batch3",
        "prefill_vs_transformers.q05.1k", "step_ms.3k",
    } <= value.keys()  # fmt: skip
    reason = {figure["name"]: figure["unit"] for figure in shown if figure["value"] is None}
    assert reason["speedup.2k.hit.llama_cpp"] == "not run: nobody has it"
    assert "no such policy" in reason["speedup_q05.1k.miss.lru"]


def test_restore(capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(restore.measure(restore.Settings((2048,), repeats=1, shape=SMALL)), capsys)
    assert rivals(shown) == {"ttft_s.2k": {"computed anew"}}
    value = {figure["name"]: figure["value"] for figure in shown}
    assert set(value) == {"ttft_s.2k", "ttft_ratio.2k", "reused.2k"}
    assert value["reused.2k"] == 0.5, "one chunk of 1,024 of the 1,843 tokens that are shared"


def test_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    few = sessions.Settings(sessions=2, prompt=512, steps=3, repeats=1, threads=1, dram_bytes=64 << 20)
    shown = printed(sessions.measure(few), capsys)
    assert rivals(shown) == {"tokens_per_s.2": {"one session"}}
    assert [figure["name"] for figure in shown] == ["tokens_per_s.2", "sessions_speedup.2"]


def test_decode_divides_the_rivals_time_by_ours() -> None:
    assert comparison.ratios([{"step": 10.0}, {"step": 9.0}], [{"step": 2.0}, {"step": 3.0}]) == [5, 3]


def test_decode_refuses_what_it_cannot_measure() -> None:
    with pytest.raises(ValueError, match="seal tails"):
        decode.Settings(steps=100, repeats=3)
    with pytest.raises(ValueError, match="multiples of 256"):
        decode.Settings(contexts=(1000,))


def test_decode_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.decoder.available_memory", lambda: 1 << 20)
    (figure,) = decode.million(few(), tmp_path)
    assert (figure.name, figure.value) == ("step_ms.3k", None)
    assert figure.unit.startswith("not run: 3072 tokens need")


@pytest.mark.parametrize("shape", [SMALL, SMALL_QWEN2], ids=["llama", "qwen2"])
def test_llama_cpp_has_the_same_weights(tmp_path: Path, shape: Shape) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    checkpoint = random_checkpoint(tmp_path, shape, seed=3)
    llama_cpp.write_gguf(checkpoint, tmp_path / "model.gguf")
    weights = llama_cpp.Weights(tmp_path / "model.gguf")
    ids = torch.randint(int(shape["vocab_size"]), (40,), generator=torch.Generator().manual_seed(3)).tolist()
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1]
    got = torch.from_numpy(llama_cpp.Context(weights, 256, threads=1).decode(ids))
    assert torch.cosine_similarity(got, expected, dim=0) > 0.999


@pytest.mark.parametrize("flash", llama_cpp.FLASH)
@pytest.mark.parametrize("kv_type", llama_cpp.KV_TYPES)
def test_llama_cpp_decodes_behind_a_full_cache(tmp_path: Path, flash: int, kv_type: int) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    checkpoint = random_checkpoint(tmp_path, SMALL, seed=3)
    llama_cpp.write_gguf(checkpoint, tmp_path / "model.gguf")
    context = llama_cpp.Context(llama_cpp.Weights(tmp_path / "model.gguf"), 512, 1, flash, kv_type)
    before = context.decode([llama_cpp.TOKEN])
    context.fill()
    assert context.end == 511
    first, second = (context.step() for _ in range(2))
    assert context.end == 511
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - before).max() > 0.01  # it attends to what it was filled with
    kv = torch.from_numpy(context.state())[-2 * 511 * 64 * 2 :].view(llama_cpp.KV_TYPES[kv_type]).float()
    assert 0.9 < kv.std() < 1.1


def test_products(capsys: pytest.CaptureFixture[str]) -> None:
    settings = products.Settings(
        (1, 5), steps=2, repeats=2, threads=1, stream_bytes=1 << 20, compared_tokens=40, shapes={"b8": SMALL}
    )
    value = {figure["name"]: figure["value"] for figure in printed(products.measure(settings), capsys)}
    kinds = [f"b8.{weights}" for weights in ("compute", "int8")]
    accuracy = [f"{name}.{what}" for name in ("b8", "retriever") for what in ("int8.difference", "int8.top1", "std")]
    times = [f"{kind}.rows{rows}{of}" for kind in kinds for rows in (1, 5) for of in ("", ".of_floor")]
    assert value.keys() == {"threads", "b8.weights", *times, *accuracy, *(f"{kind}.kept" for kind in kinds)}
    matrices = 3 * (64 * (4 + 2 * 2) * 64 + 4 * 64 * 64 + 3 * 64 * 96)
    assert value["b8.weights"] == 2 * (matrices + 512 * 64)
    assert value["b8.compute.kept"] == 0
    assert value["b8.int8.kept"] == matrices
    assert value["retriever.int8.top1"] > 95


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_has_no_facts_of_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_facts"])
    assert gpu_facts.main() == 1
    assert len(capsys.readouterr().err.splitlines()) == 1
    known = gpu_facts.facts()
    assert known["gdrdrv"] is Path("/dev/gdrdrv").exists()
    assert all(str(known[name]).startswith("not known: ") for name in ("copy_gbps", "gather_512B_gbps"))
