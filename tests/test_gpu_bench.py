"""The benchmark of the GPU path, tried where there is none: every part and option of it, and the arithmetic of floors.

Nothing is said about speed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu_decode
from bench.floor_tables import tables
from bench.floors import Cell, Load, Model, Rates, break_even, crossing, most_delta
from bench.full_attention import FullAttention, prefill
from bench.gpu_cells import VARIANTS, Behind, Bench, Settings, label
from bench.gpu_decode import PARTS, SHAPES, Plan, Results, measure
from bench.gpu_device import Processor, Span, Step, busy_us, idle_share, launch_gaps, spans_of
from bench.rivals import NotRun
from decode_worker.figures import Figure
from decode_worker.model.checkpoint import Weights
from decode_worker.model.transformer import Transformer
from decode_worker.synthetic.checkpoint import LLAMA3_8B, QWEN25_14B
from decode_worker.synthetic.weights import DrawnCheckpoint
from tests.support.device_tensor import DEVICE
from tests.support.interpreter import patched_once
from tests.support.pretend_gpu import PretendGpu, gpu

__all__ = ["gpu", "patched_once"]
ROOT = Path(__file__).parents[1]
SHAPE = SHAPES["tiny"] | {"num_hidden_layers": 2}
SETTINGS = Settings(
    "tiny", SHAPE, kernels="cpu", hits=0.5, steps=2, repeats=2, few_steps=1, warm_steps=3, copy_threads=1
)  # fmt: skip
PLAN = Plan(
    {512: (1,)}, variants=("-layer-launched",), launched=("lru",), examined=("qsac",), missing=(0.0, 1.0),
    windows=("shm", "gdr"), volumes=(64 << 10,), threads=(1,), prefill=(512,), figure9=((1, 512), (2, 512)),
    figure13=((1, 256),),
)  # fmt: skip
POLICIES = ("qsac", "lru", "infinigen", "full", "litecache")


class Small(Processor):
    """Copies that take no time; and a device that is full from so many bytes on."""

    copy_bytes = 1 << 16
    launches = 5

    def __init__(self, free_bytes: int = 1 << 40) -> None:
        super().__init__()
        self._free_bytes = free_bytes

    def free_bytes(self) -> int:
        return self._free_bytes


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the whole of it ---


@pytest.mark.timeout(280)
def test_every_part(tmp_path: Path) -> None:
    results = Results("none", tmp_path / "out.json")
    measure(SETTINGS, PLAN, Small(), tmp_path, PARTS, results)
    assert results.failed == []
    value = {figure.name: figure.value for figure in results.figures}
    cells = [("512", 1), ("512", 2), ("256", 1)]
    names = {f"tokens_per_s.tiny.{policy}.{b}.{at}" for policy in (*POLICIES, "torch") for at, b in cells}
    assert {name for name in value if name.startswith("tokens_per_s")} == names | {
        "tokens_per_s.tiny.qsac-layer-launched.1.512",
        "tokens_per_s.tiny.lru-launched.1.512",
    }
    assert all(value[name] for name in names)
    beside = {figure.rival for figure in results.figures if figure.name == "tokens_per_s.tiny.qsac.1.512"}
    assert beside == {"floor", "lru", "infinigen", "full", "litecache", "torch", "qsac-layer-launched", "lru-launched"}
    assert {f"breakdown_us.tiny.qsac.512.{phase}" for phase in ("products", "look_up", "arrive", "attend")} <= set(
        value
    )
    assert value["hit_ratio.tiny.qsac.1.512"] == 0.5
    assert value["hit_ratio.tiny.infinigen.1.512"] == 0
    assert value["delta.tiny.litecache.1.512"] == 1
    moved = {policy: value[f"moved.tiny.{policy}.1.512"] for policy in POLICIES}
    assert 0 < moved["qsac"] < moved["infinigen"]
    assert moved["full"] == 0
    assert 0 <= value["idle_share.tiny.qsac.1.512"] < 1
    assert "break_even.tiny.512" in value
    assert value["transfer_gbps.shm.65536.1"]
    refused = next(figure for figure in results.figures if figure.name == "transfer_gbps.gdr.65536.1")
    assert refused.value is None
    assert value["prefill_ratio.tiny.512"]
    shown = json.loads((tmp_path / "out.json").read_text())
    assert shown["device"] == "none"
    assert [figure["name"] for figure in shown["figures"]] == [figure.name for figure in results.figures]


class Pretended(Small):
    torch_device = DEVICE


def drawn_on_the_host(self: DrawnCheckpoint, dtype: torch.dtype, device: torch.device) -> Weights:
    """The pretended GPU has no random numbers."""
    made = DRAWN(self, dtype, torch.device("cpu"))

    def there(owner: Any) -> Any:
        moved = {name: x.to(device) for name, x in vars(owner).items() if isinstance(x, torch.Tensor)}
        return replace(owner, **moved)

    return there(replace(made, layers=tuple(map(there, made.layers))))


DRAWN = DrawnCheckpoint.weights


@pytest.mark.timeout(280)
def test_on_a_pretended_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: PretendGpu, patched_once: None
) -> None:
    """Kernels of a GPU, interpreted; graphs; tickets that the device posts."""
    monkeypatch.setattr(DrawnCheckpoint, "weights", drawn_on_the_host)
    settings = replace(SETTINGS, kernels="triton", window="bounce", steps=1, repeats=1)
    plan = replace(PLAN, main={256: (1,)}, policies=("qsac",), variants=(), launched=(), windows=("bounce",))
    results = Results("pretended")
    measure(settings, plan, Pretended(), tmp_path, ("main", "transfer"), results)
    assert results.failed == []
    value = {figure.name: figure.value for figure in results.figures}
    assert value["hit_ratio.tiny.qsac.1.256"] == 0.5
    assert value["moved.tiny.qsac.1.256"]
    assert value["transfer_gbps.bounce.65536.1"]
    assert [graph.replays > 0 for graph in gpu.made] == [True] * 3, "a trial of its window, the cell, a trial"


def test_a_trace_gives_idle_time_and_gaps(tmp_path: Path) -> None:
    class Traced(Small):
        def trace(self, run: Step) -> list[Span]:
            run()
            return [Span("a", 0, 9), Span("b", 10, 20)]

    results = Results("none")
    plan = replace(PLAN, main={256: (1,)}, examined=("full",))
    measure(SETTINGS, plan, Traced(), tmp_path, ("idle",), results)
    value = {figure.name: figure.value for figure in results.figures}
    assert value["idle_share.tiny.full.1.256"] == pytest.approx(1 / 20)
    assert value["launch_gaps.tiny.full.1.256"] == pytest.approx(1 / 20)


def test_what_does_not_fit_says_how_much_it_is(tmp_path: Path) -> None:
    results = Results("none")
    sizes = Model.of(SHAPE)
    plan = replace(PLAN, main={512: (1, 2)}, policies=("qsac", "full"), variants=(), launched=())
    measure(SETTINGS, plan, Small(sizes.held_bytes + (1 << 18)), tmp_path, ("main",), results)
    assert results.failed == []
    why = {figure.name: figure.unit for figure in results.figures if figure.value is None}
    needed = Cell(sizes, "full", 2, 512).device_bytes - sizes.held_bytes
    assert (
        f"{needed:,} bytes needed on the device, {sizes.held_bytes + (1 << 18):,} are free"
        in (why["tokens_per_s.tiny.full.2.512"])
    )
    assert why["tokens_per_s.tiny.full.2.512"].startswith("not run: out of memory: ")


def test_a_cell_that_fails_ends_none_but_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = Behind.ours

    def failing(self: Behind, policy: str, batch: int, variant: str = "") -> Iterator[Figure]:
        if policy == "lru":
            raise RuntimeError("broken\nfor a reason")
        return ours(self, policy, batch, variant)

    monkeypatch.setattr(Behind, "ours", failing)
    results = Results("none")
    plan = replace(PLAN, main={512: (1,)}, policies=("lru", "qsac"), variants=(), launched=())
    measure(SETTINGS, plan, Small(), tmp_path, ("main",), results)
    assert results.failed == ["tokens_per_s.tiny.lru.1.512"]
    values = {figure.name: figure for figure in results.figures}
    assert values["tokens_per_s.tiny.lru.1.512"].unit == "not run: RuntimeError: broken"
    assert values["tokens_per_s.tiny.qsac.1.512"].value


def test_nothing_begins_behind_the_end_of_its_time() -> None:
    results = Results("none", seconds=0.0)
    results.take("figure", lambda: pytest.fail("it has begun"))
    (figure,) = results.figures
    assert (figure.name, figure.value) == ("figure", None)
    assert "--seconds" in figure.unit


def test_the_device_running_out_of_memory_is_an_answer() -> None:
    def full() -> list[Figure]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    results = Results("none")
    results.take("figure", full, torch.OutOfMemoryError)
    assert results.failed == []
    assert results.figures[0].unit == "not run: out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."


# --- the command ---


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "torch finds no GPU here"),
        (["--shape", "tiny"], "torch finds no GPU here"),
        (["--kernels", "cpu"], "add --shape tiny"),
        (["--shape", "tiny", "--kernels", "cpu", "--steps", "999"], "must be at most"),
        (["--shape", "tiny", "--kernels", "cpu", "--hits", "1.5"], "hits=1.5"),
    ],
)
def test_what_would_say_nothing_is_refused(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_decode", *words])
    assert gpu_decode.main() == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert said in shown.err


def test_the_command_writes_what_it_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = f"--shape tiny --kernels cpu --only transfer --steps 1 --repeats 1 --json --out {out}"
    monkeypatch.setattr("sys.argv", ["gpu_decode", *words.split()])
    assert gpu_decode.main() == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["device"].startswith("none: ")
    assert "no figure means anything" in shown["device"]
    assert json.loads(out.read_text()) == shown


def test_quick_is_a_part_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = gpu_decode._parser()
    whole, quick = (gpu_decode._plan(parser.parse_args(words)) for words in ([], ["--quick"]))
    assert list(quick.main) == list(whole.main)
    assert set(quick.variants) < set(whole.variants) == set(VARIANTS) - {""}
    assert quick.figure9 == quick.figure13 == ()
    assert "shm" not in whole.windows


@pytest.mark.parametrize("shape", ["llama3-8b", "qwen2.5-14b"])
def test_the_plans_contexts_can_be_stored(shape: str) -> None:
    plan = gpu_decode.PLANS[shape]
    contexts = {*plan.main, *plan.prefill, *(context for _, context in plan.figure9 + plan.figure13)}
    assert all(context % 256 == 0 for context in contexts)
    assert plan.context_max == max(contexts)


def test_the_tables_of_the_docs_are_those_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_decode", "--floors"])
    assert gpu_decode.main() == 0
    assert capsys.readouterr().out.strip() == tables().strip()
    assert tables().strip() in (ROOT / "docs" / "performance.md").read_text()


# --- floors ---

RATES = Rates(memory_gbps=1000, bus_gbps=10, launch_us=1, source="made up")
LLAMA = Model.of(LLAMA3_8B)


def test_sizes_of_a_model() -> None:
    """Llama-3-8B has 8.03 billion parameters; Qwen2.5-14B keeps 192 KiB of a token (LiteCache: 93.75 GB of 512K)."""
    assert LLAMA.layer_weights == 4096 * (48 * 128 + 4096 + 3 * 14336)
    assert LLAMA.held_bytes / 2 == pytest.approx(8.03e9, rel=1e-3)
    assert LLAMA.held_bytes - LLAMA.read_bytes == 2 * 4096 * 128_256
    assert LLAMA.kv_token_bytes == 128 << 10
    assert Model.of(QWEN25_14B).kv_token_bytes * (512 << 10) == 96 << 30


def test_a_prompt_takes_its_matrices_and_half_of_all_pairs() -> None:
    model = Model(layers=2, hidden=8, ffn=4, q_heads=2, kv_heads=1, head_dim=4, vocab=16)
    assert model.layer_weights == 8 * (4 * 4 + 8 + 12)
    assert model.prefill_flops(10) == 2 * 10 * 2 * 288 + 2 * 100 * 2 * 2 * 4


@pytest.mark.parametrize(
    ("policy", "missing", "part", "selected"),
    [
        ("qsac", 0.2, 0.5, 100),
        ("litecache", 0.2, 1.0, 100),
        ("infinigen", 1.0, 0.5, 100),
        ("lru", 1.0, 0.1, 64),  # half of ceil(112.5 / 8) units of 8 records, in whole units
    ],
)
def test_bytes_of_a_step(policy: str, missing: float, part: float, selected: int) -> None:
    """One resident layer, two that select; 1,000 tokens, records of 512 B, 36 B of index each."""
    model = Model(layers=3, hidden=256, ffn=512, q_heads=4, kv_heads=2, head_dim=128, vocab=100)
    load = Load(missing=0.2, delta=0.5, budget=0.1, lru_missing=0.1)
    cell = Cell(model, policy, batch=2, context=1000, load=load)
    assert cell.offloaded_heads == 4
    assert cell.attended_bytes == 2 * 512 * (2 * 1000 + 4 * selected)
    assert cell.scanned_bytes == pytest.approx(2 * missing * 4 * 1000 * 36)
    assert cell.moved_bytes == pytest.approx(2 * missing * part * 4 * selected * 512)
    queries = 2 * 2 * 256 * 4 * 128  # once more, of the two layers that select: predicted a layer ahead
    assert cell.memory_bytes == pytest.approx(
        model.read_bytes + queries + cell.attended_bytes + cell.scanned_bytes + cell.moved_bytes
    )
    assert cell.bus_us(RATES) == pytest.approx(cell.moved_bytes / 10_000)
    assert cell.device_bytes == model.held_bytes + 2 * (cell.geometry.device_bytes + 4 * 1000 * 36)


def test_full_attention_reads_everything_and_moves_nothing() -> None:
    cell = Cell(LLAMA, "full", batch=4, context=128 << 10)
    assert cell.attended_bytes == 4 * (128 << 10) * (128 << 10)
    assert cell.scanned_bytes == cell.moved_bytes == 0
    assert cell.launches() == 32 * (9 + 2)
    assert Cell(LLAMA, "qsac", 4, 128 << 10).launches() == 32 * 9 + 31 * (3 + 6) + 2
    by_hand_us = (cell.model.read_bytes + cell.attended_bytes) / 1e6 + 352
    assert cell.step_us(RATES) == pytest.approx(by_hand_us)
    assert cell.tokens_per_s(RATES) == pytest.approx(4e6 / by_hand_us)


def test_the_slower_of_memory_and_bus_decides() -> None:
    cell = Cell(LLAMA, "infinigen", batch=1, context=128 << 10)
    slow, fast = RATES, replace(RATES, bus_gbps=1e6)
    assert cell.step_us(slow) == cell.bus_us(slow) == pytest.approx(cell.moved_bytes / 1e4)
    assert cell.step_us(fast) == cell.memory_us(fast) + cell.launches()


def test_break_even() -> None:
    """What misses takes as long as all KV where missing * budget * delta is the ratio of the rates."""
    assert RATES.break_even == 0.01
    context = 128 << 10
    cell = Cell(LLAMA, "qsac", 1, context, Load(missing=0.2, delta=0.5, budget=0.1))
    assert cell.bus_us(RATES) == pytest.approx(cell.offloaded_heads * context * 512 / 1e6, rel=1e-3)
    assert most_delta(cell, RATES, cell.bus_us(RATES) / 2) == pytest.approx(0.25)
    assert break_even(cell, RATES, cell.bus_us(RATES) / 2) == pytest.approx(0.2 * 0.1 * 0.25, rel=1e-3)
    assert crossing([(0.0, 1.0), (0.1, 3.0), (0.2, 7.0)], 5.0) == pytest.approx(0.15)
    assert crossing([(0.0, 1.0), (0.1, 3.0)], 5.0) is None
    assert crossing([(0.1, 6.0), (0.2, 7.0)], 5.0) is None


# --- traces ---


def test_a_trace_tells_pauses_between_launches_from_those_between_steps() -> None:
    events = [
        {"cat": "kernel", "name": name, "ts": first, "dur": end - first}
        for name, first, end in (("b", 12, 20), ("a", 0, 10), ("c", 15, 18), ("a", 100, 104), ("b", 105, 110))
    ]
    others = [{"cat": "cpu_op", "name": "x", "ts": 0, "dur": 500}, {"ph": "M", "name": "process"}]
    spans = spans_of({"traceEvents": events + others})
    assert spans[0] == Span("a", 0, 10)
    assert [span.name for span in spans] == ["a", "b", "c", "a", "b"]
    assert busy_us(spans) == 10 + 8 + 4 + 5
    assert idle_share(spans) == pytest.approx(1 - 27 / 110)
    assert launch_gaps(spans, steps=2) == pytest.approx(3 / 30)
    assert launch_gaps(spans, steps=1) == pytest.approx(idle_share(spans))


# --- what it compares with ---


@pytest.fixture
def model(tmp_path: Path) -> Transformer:
    return Transformer.load(DrawnCheckpoint.of(tmp_path, SHAPE, seed=1), 1024, torch.float32)


def test_drawn_weights_are_those_of_their_seed(tmp_path: Path, model: Transformer) -> None:
    again, other = (DrawnCheckpoint.of(tmp_path, SHAPE | {"model_type": "qwen2"}, seed) for seed in (1, 2))
    assert again.fingerprint(1024, torch.float32, "bfloat16", 1) != other.fingerprint(
        1024, torch.float32, "bfloat16", 1
    )
    mine, same, different = (
        each.weights(torch.float32, torch.device("cpu")) for each in (again, replace(again), other)
    )  # fmt: skip
    assert mine.layers[1].qkv_bias is not None
    torch.testing.assert_close(mine.layers[1].down, same.layers[1].down, rtol=0, atol=0)
    assert not torch.equal(mine.layers[1].down, different.layers[1].down)
    assert not any(path.suffix == ".safetensors" for path in tmp_path.iterdir())


def test_full_attention_is_that_of_the_model(model: Transformer) -> None:
    """A step behind the K and V of a prompt says what the prompt's last token says."""
    ids = torch.randint(256, (40,), generator=torch.Generator().manual_seed(3))
    expected = prefill(model, ids)
    rival = FullAttention(model, 1, len(ids))
    rival._tokens.fill_(int(ids[-1]))
    with torch.inference_mode():
        x, positions = model.embed(ids), torch.arange(len(ids))
        for layer, (keys, values) in enumerate(rival._kv):
            q, k, v = model.qkv(layer, x, positions)
            keys[0], values[0] = k.transpose(0, 1), v.transpose(0, 1)
            scores = (q.transpose(0, 1) @ k.repeat_interleave(2, 1).permute(1, 2, 0)) * model.scale
            mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
            weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
            x = model.finish(layer, x, (weights @ v.repeat_interleave(2, 1).transpose(0, 1)).transpose(0, 1))
        torch.testing.assert_close(model.logits(x[-1:])[0], expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rival.step()[0], expected, rtol=1e-3, atol=1e-3)


def test_a_bench_needs_room_for_the_weights(tmp_path: Path) -> None:
    bench = Bench(SETTINGS, Small(1000), RATES, tmp_path, 512)
    with pytest.raises(NotRun, match="out of memory"):
        _ = bench.model
    assert label(512) == "512"
    assert label(128 << 10) == "128k"
