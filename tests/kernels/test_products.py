"""The native products against the model's torch methods: every architecture, type of weights and instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from decode_worker import _native
from decode_worker.kernels.products import PRODUCTS, Products
from decode_worker.kernels.products.base import WEIGHTS
from decode_worker.kernels.products.int8 import quantised
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.transformer import Transformer
from tests.model.tiny_models import ARCHITECTURES, MAX_POSITIONS, save, tiny_model
from tests.support.device_tensor import DEVICE
from tests.support.pretend_gpu import RecordedGraph

TOLERANCE = 5e-5


@pytest.fixture(autouse=True)
def one_torch_thread():
    """torch's threads would hold the cores that the kernels' threads want."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a tiny model, made once."""
    made = {}

    def directory(architecture, scaling, head_dim, **sizes):
        key = (architecture, scaling, head_dim, *sizes.items())
        if key not in made:
            made[key] = save(tiny_model(architecture, scaling, head_dim, **sizes), tmp_path_factory.mktemp("model"))
        return made[key]

    return directory


@pytest.fixture
def load(saved):
    """A tiny model in float32 or bfloat16, and the same weights as a float32 model."""

    def make(architecture, dtype=torch.float32, scaling="default", head_dim=64, **sizes):
        checkpoint = Checkpoint.open(saved(architecture, scaling, head_dim, **sizes))
        model = Transformer.load(checkpoint, MAX_POSITIONS, dtype)
        return model, Transformer(model.config, model.weights.to(torch.float32), MAX_POSITIONS)

    return make


def step(products: Products, model: Transformer, rng, rows: int) -> dict[str, torch.Tensor]:
    """One step with random tokens, positions and attention; everything that it makes, by name."""
    products.tokens[:rows] = torch.from_numpy(rng.integers(0, model.config.vocab, rows))
    products.positions[:rows] = torch.from_numpy(rng.integers(0, MAX_POSITIONS, rows))
    made = {}
    products.embed(rows)
    for layer in range(model.config.layers):
        products.layer(layer, rows, speculate=True)
        for name in ("query", "key", "value", "next_query"):
            made[f"{name} {layer}"] = getattr(products, name)[:rows].clone()
        for further in range(layer + 1, model.config.layers):
            products.peek(further, rows)
            made[f"peeked {further} {layer}"] = products.next_query[:rows].clone()
        if layer + 1 < model.config.layers:
            assert torch.equal(made[f"peeked {layer + 1} {layer}"], made[f"next_query {layer}"])
        products.attention[:rows] = torch.from_numpy(rng.standard_normal(products.attention[:rows].shape, np.float32))
    products.finish(rows)
    return made | {"logits": products.logits[:rows].clone()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        scale = expected[name].abs().max().clamp_min(1)
        assert (value - expected[name]).abs().max() <= TOLERANCE * scale, name


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_equals_the_reference(level, rng, load, architecture, dtype, weights):
    model, wide = load(architecture, dtype)
    seed, rows = rng.integers(1 << 30), int(rng.integers(1, 12))
    native = step(PRODUCTS["cpu"](model, 12, 2, weights), model, np.random.default_rng(seed), rows)
    plain = step(PRODUCTS["reference"](wide, 12, 2, weights), wide, np.random.default_rng(seed), rows)
    assert_close(native, plain)
    assert native["next_query 0"].std() > 0.1
    assert native["logits"].std() > 0.3, "logits that hardly vary prove nothing"


@pytest.mark.parametrize("scaling", ["linear", "llama3", "yarn", "longrope"])
def test_every_rope_scaling_equals_the_reference(rng, load, scaling):
    model, _ = load("llama3", scaling=scaling)
    seed = rng.integers(1 << 30)
    native, plain = (
        step(PRODUCTS[name](model, 4, 1, "compute"), model, np.random.default_rng(seed), 4)
        for name in ("cpu", "reference")
    )
    assert_close(native, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_size_equals_the_reference(level, rng, load, dtype):
    """Sizes that are no multiple of any vector."""
    for _ in range(2):
        sizes = {
            "hidden_size": 6 * int(rng.integers(1, 25)),
            "intermediate_size": int(rng.integers(1, 150)),
            "vocab_size": int(rng.integers(3, 300)),
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
        }
        print(sizes)
        model, wide = load("llama3", dtype, head_dim=int(rng.choice([16, 48, 80])), **sizes)
        seed = rng.integers(1 << 30)
        for weights in WEIGHTS:
            native = step(PRODUCTS["cpu"](model, 7, 2, weights), model, np.random.default_rng(seed), 7)
            plain = step(PRODUCTS["reference"](wide, 7, 2, weights), wide, np.random.default_rng(seed), 7)
            assert_close(native, plain)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_threads_and_other_rows_change_no_bit(level, rng, load, dtype, weights):
    model, _ = load("qwen3", dtype, intermediate_size=200, vocab_size=333)
    rows, seed = 11, rng.integers(1 << 30)
    expected = step(PRODUCTS["cpu"](model, 64, 1, weights), model, np.random.default_rng(seed), rows)
    for threads in (2, 3):
        found = step(PRODUCTS["cpu"](model, rows, threads, weights), model, np.random.default_rng(seed), rows)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    for first, count in ((0, 1), (3, 2), (4, 3), (7, 4)):
        alone = step_of(PRODUCTS["cpu"](model, 4, 2, weights), model, np.random.default_rng(seed), rows, first, count)
        for name, value in expected.items():
            assert torch.equal(alone[name], value[first : first + count]), (name, first, count)


def step_of(products, model, rng, rows, first, count):
    """The rows first .. first + count - 1 of what `step` would do with `rows` rows, alone."""

    class Part:
        def integers(self, low, high, size):
            return rng.integers(low, high, size=rows)[first : first + count]

        def standard_normal(self, shape, dtype):
            return rng.standard_normal((rows, *shape[1:]), dtype)[first : first + count]

    return step(products, model, Part(), count)


def test_what_lies_outside_is_refused(load):
    model, _ = load("llama2")
    for name in PRODUCTS.names:
        products = PRODUCTS[name](model, 2, 1, "compute")
        for positions, tokens in (([MAX_POSITIONS, 0], [0, 0]), ([0, -1], [0, 0]), ([0, 0], [0, model.config.vocab])):
            with pytest.raises(IndexError, match=r"(token|position) -?\d+ is not in \[0, \d+\)"):
                products.place(tokens, positions)
            if name == "cpu":  # which looks once more, at the memory that it is about to read
                products.positions[:], products.tokens[:] = torch.tensor(positions), torch.tensor(tokens)
                with pytest.raises(IndexError):
                    products.embed(2)
        products.place([0, 0], [0, 0])
        products.embed(2)
    with pytest.raises(ValueError, match="3 rows"):
        products.embed(3) if name == "cpu" else PRODUCTS["cpu"](model, 2, 1, "compute").embed(3)
    with pytest.raises(KeyError, match="kernels='gpu': known are cpu, reference"):
        PRODUCTS["gpu"]


def test_weights_that_do_not_fit_are_refused():
    matrix = torch.ones(4, 3)
    with pytest.raises(ValueError, match="scales"):
        _native.Matrix(matrix.to(torch.int8))
    with pytest.raises(ValueError, match="one bias per output"):
        _native.Matrix(matrix, None, torch.ones(3))
    with pytest.raises(ValueError, match="float32, bfloat16 or int8"):
        _native.Matrix(matrix.half())


def test_int8_is_within_half_a_step_of_each_weight(rng):
    matrix = torch.from_numpy(rng.standard_normal((50, 70), np.float32)) * torch.logspace(-30, 3, 50)[:, None]
    matrix[7] = 0
    whole, scales = quantised(matrix)
    assert whole.abs().max() == 127
    assert ((whole * scales[:, None] - matrix).abs() <= scales[:, None] * 0.501).all()


def test_parts_that_are_replayed_go_on_from_parts_that_are_not(saved, rng):
    """As in a step whose host waits before each layer, when one part cannot be captured."""
    checkpoint = Checkpoint.open(saved("llama2", "default", 64))
    model = Transformer.load(checkpoint, MAX_POSITIONS, device=DEVICE)
    products, right = (PRODUCTS["reference"](model, 2, 1, "compute") for _ in range(2))
    graph = RecordedGraph()
    for number in range(3):
        for made in (products, right):
            made.tokens.copy_(torch.tensor([number, 7 + number]).to(DEVICE))
            made.embed(2)
        if number == 0:
            graph.capture(lambda: products.layer(0, 2, True))
        graph.replay()
        right.layer(0, 2, True)
        assert torch.equal(products.key.cpu(), right.key.cpu()), number
        for made in (products, right):
            for layer in range(1, model.config.layers):
                made.layer(layer, 2, False)
            made.finish(2)
        assert torch.equal(products.logits.cpu(), right.logits.cpu()), number
