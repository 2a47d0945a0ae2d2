"""The oracle against transformers, against arithmetic by hand, and against itself."""

import ast
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from .heads import Profile, Settings, similarity, thresholds
from .model import attention, round_to
from .qsac import Oracle
from .replay import Replay
from .retriever import best, best_units, default_hash_weights, exact_scores, hash_scores

SEED = 20
VOCABULARY = 96
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def rng() -> np.random.Generator:
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def save_random_model(directory: Path, kind: str, **changes):
    """A tiny random model of transformers, saved into `directory`; biases and norms random too."""
    import torch
    import transformers

    torch.manual_seed(SEED)
    family = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
    }
    config = getattr(transformers, f"{family}Config")(**(shape | changes))
    network = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith(".bias") or "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    network.save_pretrained(directory)
    return network


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save_random_model(directory, "llama")
    return directory


def tokens_of_set(oracle: Oracle, layer: int, head: int) -> np.ndarray:
    return np.sort(oracle.heads.maps[layer, head][oracle.heads.state[layer, head].records])


# The forward pass


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
    ids=["llama", "llama3-rope-tied", "qwen2", "qwen3"],
)
def test_full_policy_equals_transformers(tmp_path: Path, rng: np.random.Generator, kind: str, changes: dict) -> None:
    import torch

    network = save_random_model(tmp_path, kind, **changes)
    ids = rng.integers(VOCABULARY, size=320)
    with torch.no_grad():
        expected = network(torch.from_numpy(ids)[None]).logits[0].numpy()
    oracle = Oracle(tmp_path, policy="full")
    logits = [oracle.prefill(ids[:300])] + [oracle.step(token) for token in ids[300:]]
    np.testing.assert_allclose(np.stack(logits), expected[299:], rtol=0, atol=1e-4)


def test_reduced_precision_files_are_widened(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from .checkpoint import read_tensors

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        tensor = torch.linspace(-3, 3, 35).reshape(5, 7).to(dtype)
        save_file({"x": tensor, "y": tensor[0].clone()}, tmp_path / "model.safetensors")
        read = read_tensors(tmp_path)
        np.testing.assert_array_equal(read["x"], tensor.float().numpy())
        np.testing.assert_array_equal(read["y"], tensor[0].float().numpy())


def test_bfloat16_rounding_is_to_nearest_even(rng: np.random.Generator) -> None:
    import torch

    x = np.concatenate([rng.standard_normal(4096), [0.0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8, 1e38]])
    x = x.astype(np.float32)
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(round_to(x, "bfloat16"), expected)
    np.testing.assert_array_equal(round_to(x, "float32"), x)


def test_everything_attends_to_rounded_keys_and_values(llama: Path, rng: np.random.Generator) -> None:
    ids = rng.integers(VOCABULARY, size=300)
    exact, rounded = Oracle(llama, policy="full"), Oracle(llama, storage="bfloat16", policy="full")
    prefilled = np.abs(exact.prefill(ids) - rounded.prefill(ids)).max()
    first, kept = exact.layers[0], rounded.layers[0]  # behind it the inputs differ already
    np.testing.assert_array_equal(kept.keys, round_to(first.keys, "bfloat16"))
    np.testing.assert_array_equal(kept.values, round_to(first.values, "bfloat16"))
    stepped = np.abs(exact.step(1) - rounded.step(1)).max()
    assert 0 < prefilled < 0.5
    assert 0 < stepped < 0.5
    for layer in rounded.layers:
        np.testing.assert_array_equal(layer.keys, round_to(layer.keys, "bfloat16"))


# Similarity and thresholds


def rows(*cosines: float) -> tuple[np.ndarray, np.ndarray]:
    """A query and a label [g, 2] whose heads have these cosines."""
    query = np.array([[c, math.sqrt(1 - c * c)] for c in cosines], np.float32)
    return query, np.tile(np.array([2.0, 0.0], np.float32), (len(cosines), 1))


@pytest.mark.parametrize(
    ("cosines", "weights", "expected"),
    [
        ((0.7,), (0.3,), 0.7),
        ((0.5, 1.0), (1, 1), 2 / 3),
        ((0.5, 1.0), (3, 1), 4 / 7),
        ((0.5, 1.0), (0, 1), 1.0),
        ((0.9, 0.9, 0.9, -0.31), (1, 1, 1, 1), -0.31),
        ((0.9, -0.5), (1, 0), -0.5),
        ((0.9, 0.0005), (1, 1), 0.0005),
        ((0.9, 0.4), (0, 0), 0.4),
        ((0.5, 0.002), (1, 1), 2 / (1 / 0.5 + 1 / 0.002)),
    ],
)
def test_similarity(cosines: tuple, weights: tuple, expected: float) -> None:
    value = similarity(*rows(*cosines), np.array(weights), 1e-3)
    assert value == pytest.approx(expected, abs=1e-5)


def test_similarity_without_label_or_norm_is_a_sure_miss() -> None:
    query, label = rows(0.9, 0.9)
    weights = np.zeros(2)
    assert similarity(query, None, weights, 1e-3) == -math.inf
    for broken in (query * [[1], [0]], np.zeros_like(query)):
        assert similarity(broken, label, weights, 1e-3) == -math.inf
        assert similarity(label, broken, weights, 1e-3) == -math.inf


def test_thresholds_of_known_importances() -> None:
    tau = thresholds(np.array([0.5, 0.8, 0.9, 0.95, 1.0]), eta=0.8, p=3)
    np.testing.assert_allclose(tau, [-0.95, -0.29, 0.25, 0.54, 0.80], atol=0.006)


# Retrievers


def test_exact_scores_rank_by_attention_mass_of_the_group(rng: np.random.Generator) -> None:
    query, keys = rng.standard_normal((4, 16)), rng.standard_normal((200, 16))
    query, keys = query.astype(np.float32), keys.astype(np.float32)
    weights = np.exp(query @ keys.T / 4)
    mass = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
    np.testing.assert_allclose(exact_scores(query, keys, np.float32(0.25)), np.log(mass), atol=1e-5)


def test_hash_scores_count_differing_bits() -> None:
    weights = np.eye(3, dtype=np.float32)
    query = np.array([[1, 1, -1], [1, -1, -1]], np.float32)
    keys = np.array([[2, 2, 0], [0, 1, 1], [1, 1, 3]], np.float32)
    plain = hash_scores(query, keys, weights, np.zeros(3, np.float32))
    assert plain.tolist() == [-1, -5, -3]
    centred = hash_scores(query, keys, weights, np.array([0, 1, 2], np.float32))
    assert centred.tolist() == [-1, -3, -3]


def test_default_hash_weights_follow_the_documented_draw() -> None:
    expected = np.random.default_rng(0x48474154).standard_normal((2, 3, 8, 256), dtype=np.float32)
    np.testing.assert_array_equal(default_hash_weights(2, 3, 8), expected)


def test_ties_go_to_the_lower_index() -> None:
    chosen, gap = best(np.array([1.0, 3.0, 1.0, 1.0, 2.0]), 3)
    assert chosen.tolist() == [0, 1, 4]
    assert gap == 0
    assert best(np.array([1.0, 2.0]), 2)[1] == math.inf
    units, gap = best_units(np.array([1.0, 3.0, 2.0, 3.0, 0.0]), np.array([7, 2, 7, 1, 0]), 2)
    assert units.tolist() == [1, 2]
    assert gap == 1
    assert best_units(np.array([3.0, 3.0, 3.0]), np.array([5, 4, 4]), 1)[0].tolist() == [4]


# Hand-written traces: 12 tokens, 10 of them stored, sink 1, recent 2, two places.
# Key t points at angle t * 10 degrees, so a query at angle a prefers the tokens next to a / 10.


def at(degrees: float) -> np.ndarray:
    """A query [1, 1, 2] of norm 20, which tells neighbouring keys apart."""
    angle = math.radians(degrees)
    return np.array([[[20 * math.cos(angle), 20 * math.sin(angle)]]], np.float32)


KEYS = np.concatenate([at(10 * t) for t in range(12)]) / 20
TRACE = [(10, at(21)), (10, at(24)), (11, at(59)), (11, at(62)), (11, at(-62))]


def replay(policy: str, tau: float = 0.9, **changes) -> Replay:
    settings = Settings(policy=policy, budget=2, sink=1, recent=2)
    return Replay(KEYS, 10, 10, settings, tau=tau, **changes)


def listing(policy: str, **changes) -> list[tuple[bool, list[int], list[int], int]]:
    steps = replay(policy, **changes).run(TRACE)
    return [(t.hit, t.records.tolist(), t.fetched.tolist(), t.cover) for (t,) in steps]


def test_trace_of_qsac() -> None:
    assert listing("qsac") == [
        (False, [2, 3], [2, 3], 8),
        (True, [2, 3], [], 8),
        (False, [5, 6], [5, 6], 9),
        (True, [5, 6], [], 9),
        (False, [1, 2], [1, 2], 9),
    ]


def test_trace_of_infinigen() -> None:
    assert listing("infinigen") == [
        (False, [2, 3], [2, 3], 8),
        (False, [2, 3], [], 8),
        (False, [5, 6], [5, 6], 9),
        (False, [6, 7], [7], 9),
        (False, [1, 2], [1, 2], 9),
    ]


def test_trace_of_litecache() -> None:
    assert listing("litecache") == [
        (hit, records, [] if hit else records, cover) for hit, records, _, cover in listing("qsac")
    ]


def test_trace_of_lru() -> None:
    """20 tokens, 18 of them stored, their records in reverse: unit 0 holds tokens 17..10, unit 1 9..2, unit 2 1 and 0.
    Sink 1, recent 2: tokens [1, 15) may be selected at position 17."""
    keys = np.concatenate([at(10 * t) for t in range(20)]) / 20
    settings = Settings(policy="lru", budget=2, sink=1, recent=2)
    steps = Replay(keys, 18, 17, settings, maps=np.arange(17, -1, -1))
    traces = [trace for (trace,) in steps.run([(17, at(61)), (17, at(121)), (17, at(11))])]
    assert [trace.records.tolist() for trace in traces] == [list(range(8, 16)), list(range(3, 8)), [16]]
    assert not any(trace.hit for trace in traces)


def test_trace_of_qsac_with_a_tau_above_one_is_that_of_infinigen() -> None:
    assert listing("qsac", tau=1.01) == listing("infinigen")


def test_a_similarity_equal_to_tau_is_a_miss() -> None:
    for tau, hit in ((1.0, False), (np.nextafter(1.0, 0), True)):
        (trace,) = replay("qsac", tau=tau, last_query=at(0)).step(10, at(0))
        assert (trace.similarity, trace.hit) == (1.0, hit)


def test_trace_of_full_decides_nothing() -> None:
    full = replay("full")
    assert full.heads.offloaded == []
    assert full.heads.tokens(0, 0, 11).tolist() == list(range(12))


def test_a_prompt_seeds_the_first_set() -> None:
    assert listing("qsac", last_query=at(52))[:2] == [
        (False, [2, 3], [2, 3], 8),
        (True, [2, 3], [], 8),
    ]
    (trace,) = replay("qsac", last_query=at(42)).step(10, at(39))
    assert trace.hit
    assert (trace.records.tolist(), trace.cover) == ([4, 5], 8)


def test_records_follow_the_map_and_ties_the_token() -> None:
    tokens = np.array([9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    (trace,) = replay("qsac", maps=tokens).step(10, at(21))
    assert trace.records.tolist() == [6, 7]
    level = Replay(np.ones((12, 1, 2)), 10, 10, Settings(budget=2, sink=1, recent=2), maps=tokens)
    (trace,) = level.step(10, at(0))
    assert trace.records.tolist() == [7, 8], "tokens 2 and 1: the lowest that are no sink"


def test_ties_are_settled_alike_under_every_map(rng: np.random.Generator) -> None:
    keys = np.array([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]], np.float32)[rng.integers(0, 3, (40, 1))]
    settings = Settings(budget=9, sink=2, recent=3)
    chosen = set()
    for maps in (np.arange(36), np.arange(35, -1, -1), rng.permutation(36)):
        (trace,) = Replay(keys, 36, 38, settings, maps=maps).step(38, at(20))
        chosen.add(tuple(sorted(maps[trace.records].tolist())))
    assert len(chosen) == 1


def test_trace_of_hash(rng: np.random.Generator) -> None:
    signs = np.where(rng.standard_normal((12, 1, 256)) > 0, 1, -1).astype(np.float32)
    profile = Profile(hash_weights=np.eye(256, dtype=np.float32)[None, None])
    settings = Settings(retriever="hash", budget=2, sink=1, recent=2)
    blend = signs[3] + 0.5 * signs[6]
    steps = Replay(signs, 10, 10, settings, tau=0.9, profile=profile)
    (first,), (second,) = steps.run([(10, signs[3:4]), (10, blend[None])])
    assert 3 in first.records
    assert not second.hit
    expected = [-np.count_nonzero(key != signs[3, 0]) for key in signs[1:8, 0]]
    assert (second.records == np.sort(1 + np.argsort(-np.array(expected), kind="stable")[:2])).all()


def test_sets_never_reach_a_short_past() -> None:
    short = Replay(KEYS, 0, 3, Settings(budget=2, sink=1, recent=2))
    (trace,) = short.step(3, at(0))
    assert (trace.hit, trace.records.tolist(), trace.cover) == (False, [], 0)
    assert short.heads.tokens(0, 0, 3).tolist() == [0, 1, 2, 3]
    (trace,) = short.step(4, at(1))
    assert trace.hit, "an empty selection succeeds and labels the head"


def test_forced_misses_are_staggered() -> None:
    """tau -2 always hits; T = 40, so head h of layer 1 is forced once its tail spans 39 - (2 + h)."""
    keys = np.tile(KEYS[:1], (256, 2, 1))
    settings = Settings(budget=2, sink=1, recent=10, tail=40)
    query = np.tile(at(0), (2, 1, 1))
    steps = Replay(keys, 200, 60, settings, last_query=query, tau=-2.0, number=1)
    run = steps.run([(position, query) for position in range(60, 120)])
    forced = [[60 + i for i, traces in enumerate(run) if traces[head].forced] for head in (0, 1)]
    assert forced == [[87, 114], [86, 112]]
    assert run[27][0].cover == 77
    assert all(trace.hit != trace.forced for traces in run for trace in traces)


def test_a_full_tail_is_an_error() -> None:
    settings = Settings(budget=2, sink=1, recent=10, tail=20)
    steps = Replay(KEYS, 10, 11, settings, last_query=at(0), tau=-2.0)
    run = steps.run([(position, at(0)) for position in range(11, 30)])
    assert not run[-1][0].forced, "no miss could move the cover any more"
    with pytest.raises(RuntimeError, match="tail of head"):
        steps.step(30, at(0))


@pytest.mark.parametrize(
    ("budget", "stored", "places"),
    [(0.1, 512, 52), (0.1, 0, 1), (7, 512, 7), (600, 512, 508), (1.0, 512, 508), (1, 512, 1), (9, 0, 1)],
)
def test_places(budget: float, stored: int, places: int) -> None:
    assert Settings(budget=budget).places(stored) == places


@pytest.mark.parametrize(
    ("budget", "slack", "stored", "units"),
    [(0.1, 0.125, 1280, 9), (2, 0.125, 18, 1), (16, 0.5, 256, 2), (0.1, 0, 512, 4), (1, 0, 512, 1)],
)
def test_lru_attends_to_half_of_what_it_holds(budget: float, slack: float, stored: int, units: int) -> None:
    """0.1 of 1280: 128 places, and 16 spare ones: 18 units, of which 9 are selected."""
    assert Settings(policy="lru", budget=budget, slack=slack).selected(stored) == units


@pytest.mark.parametrize(
    "wrong", [{"policy": "none"}, {"retriever": "best"}, {"budget": 0}, {"budget": 64.0}, {"recent": -1}, {"margin": 1}]
)
def test_wrong_settings_are_refused(wrong: dict) -> None:
    with pytest.raises((ValueError, TypeError)):
        Settings(**wrong)


# Whole decoding


def test_tau_above_one_equals_plain_top_k(llama: Path, rng: np.random.Generator) -> None:
    ids = rng.integers(VOCABULARY, size=600)
    for retriever in ("exact", "hash"):
        qsac = Oracle(llama, policy="qsac", retriever=retriever, budget=32, tau=1.01)
        always = Oracle(llama, policy="infinigen", retriever=retriever, budget=32)
        assert qsac.generate(ids, 12) == always.generate(ids, 12)
        for one, other in zip(qsac.traces, always.traces, strict=True):
            np.testing.assert_array_equal(one.logits, other.logits)
            for key, head in one.heads.items():
                assert not head.hit
                np.testing.assert_array_equal(head.records, other.heads[key].records)


def test_plain_top_k_is_the_top_k_of_the_stored_tokens(llama: Path, rng: np.random.Generator) -> None:
    """Every step's set, recomputed from the traced q~ by a full sort of the summed attention."""
    oracle = Oracle(llama, policy="infinigen", budget=32, resident=())
    oracle.generate(rng.integers(VOCABULARY, size=600), 6)
    for step in oracle.traces:
        limit = min(512, step.position - 64)
        for (layer, head), decision in step.heads.items():
            keys = oracle.layers[layer].keys[4:limit, head].astype(np.float64)
            weights = np.exp(decision.query @ keys.T / 4)
            mass = (weights / weights.sum(axis=1, keepdims=True)).sum(axis=0)
            assert decision.cover == limit
            assert set(decision.records) == set(4 + np.argsort(-mass)[:32]) or decision.gap < 1e-5


def test_all_places_and_permanent_misses_equal_full_attention(llama: Path, rng: np.random.Generator) -> None:
    ids = rng.integers(VOCABULARY, size=600)
    full = Oracle(llama, policy="full")
    sparse = Oracle(llama, policy="infinigen", budget=1.0, resident=())
    expected, logits = full.prefill(ids), sparse.prefill(ids)
    for token in ids[:16]:
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5)
        expected, logits = full.step(token), sparse.step(token)


def test_the_order_of_records_changes_nothing(llama: Path, rng: np.random.Generator) -> None:
    ids = rng.integers(VOCABULARY, size=600)
    maps = np.stack([[rng.permutation(512) for _ in range(2)] for _ in range(3)])
    plain, mapped = Oracle(llama, budget=32), Oracle(llama, budget=32)
    plain.prefill(ids)
    mapped.prefill(ids, maps)
    for token in ids[:8]:
        np.testing.assert_allclose(plain.step(token), mapped.step(token), rtol=0, atol=1e-4)
        for key in plain.heads.offloaded:
            np.testing.assert_array_equal(tokens_of_set(plain, *key), tokens_of_set(mapped, *key))


def test_prefill_seeds_every_head_with_the_last_query(llama: Path, rng: np.random.Generator) -> None:
    """The step that repeats the last prompt token one position later is close to its label."""
    ids = rng.integers(VOCABULARY, size=600)
    oracle = Oracle(llama, budget=32, resident=())
    oracle.prefill(ids)
    state = oracle.heads.state
    assert set(state) == {(layer, head) for layer in range(3) for head in range(2)}
    assert all(len(head.records) == 32 and head.cover == 512 for head in state.values())
    last, here = oracle.model.embed(ids[-1:]), np.array([599])
    for layer in (0, 1):
        query = oracle.model.query(layer, last, here)[0]
        for head in range(2):
            np.testing.assert_allclose(state[layer, head].label, query[head], atol=1e-6)


def test_speculative_queries_read_the_input_of_the_layer_before(llama: Path, rng: np.random.Generator) -> None:
    oracle = Oracle(llama, budget=32, resident=())
    oracle.prefill(rng.integers(VOCABULARY, size=300))
    oracle.step(7)
    embedded, here = oracle.model.embed(np.array([7])), np.array([300])
    for layer in (0, 1):
        query = oracle.model.query(layer, embedded, here)[0]
        np.testing.assert_array_equal(oracle.traces[0].heads[layer, 1].query, query[1])
    later = oracle.model.query(2, embedded, here)[0]
    assert not np.allclose(oracle.traces[0].heads[2, 1].query, later[1])


def test_attach_starts_without_labels(llama: Path, rng: np.random.Generator) -> None:
    ids, question = rng.integers(VOCABULARY, size=600), [5, 9, 2]
    oracle = Oracle(llama, budget=32, tau=-2.0)
    oracle.greedy(oracle.attach(ids, question), 2)
    assert [step.token for step in oracle.traces[:3]] == question
    assert [step.position for step in oracle.traces] == [600, 601, 602, 603]
    for key in oracle.heads.offloaded:
        hits = [step.heads[key].hit for step in oracle.traces]
        assert hits == [False, True, True, True]
        assert len(oracle.traces[0].heads[key].fetched) == 32


def test_sealing_adds_records_and_leaves_sets_alone(llama: Path, rng: np.random.Generator) -> None:
    """A prompt of 500: N = 256 until the step at 256 + 320 = 576 ends."""
    oracle = Oracle(llama, storage="bfloat16", budget=16, tau=-2.0, tail=600)
    oracle.prefill(rng.integers(VOCABULARY, size=500))
    for token in rng.integers(VOCABULARY, size=80):
        oracle.step(token)
    assert [step.position for step in oracle.traces if step.stored == 256][-1] == 576
    assert next(step.position for step in oracle.traces if step.stored == 512) == 577
    assert oracle.stored == 512
    before, after = oracle.traces[76].heads, oracle.traces[77].heads
    for key in oracle.heads.offloaded:
        assert after[key].hit
        assert after[key].cover == before[key].cover == 256
        np.testing.assert_array_equal(after[key].records, before[key].records)
    oracle.heads.tau = np.full((3, 2), 2.0)
    oracle.step(1)
    assert {head.cover for head in oracle.traces[-1].heads.values()} == {512}
    assert any((head.records >= 256).any() for head in oracle.traces[-1].heads.values())


def test_sealing_can_be_left_to_the_caller(llama: Path, rng: np.random.Generator) -> None:
    oracle = Oracle(llama, budget=16, auto_seal=False)
    oracle.prefill(rng.integers(VOCABULARY, size=500))
    for token in rng.integers(VOCABULARY, size=80):
        oracle.step(token)
    assert oracle.stored == 256
    oracle.seal(np.arange(511, 255, -1))
    oracle.step(1)
    assert oracle.stored == 512
    with pytest.raises(AssertionError, match="permute"):
        oracle.seal(np.arange(256))


def test_qsac_decodes_with_hits_and_misses(llama: Path, rng: np.random.Generator) -> None:
    """A run across a sealing; the sets are checked inside the oracle at every step."""
    importance = rng.uniform(0.7, 1.0, (3, 2))
    profile = Profile(importance=importance, weights=rng.uniform(0, 1, (3, 2, 2)))
    oracle = Oracle(llama, "bfloat16", retriever="hash", budget=0.05, profile=profile)
    oracle.generate(rng.integers(VOCABULARY, size=300), 300)
    hits = [head.hit for step in oracle.traces for head in step.heads.values()]
    print(f"hit ratio {np.mean(hits):.2f}")
    assert 0 < np.mean(hits) < 1
    assert oracle.stored == 512
    for step in oracle.traces:
        assert all(head.hit == (head.similarity > head.tau and not head.forced) for head in step.heads.values())


def test_decode_attention_reads_exactly_the_listed_tokens(llama: Path, rng: np.random.Generator) -> None:
    """Layer 0's output, recomputed from the listed tokens with one plain softmax per query head."""
    oracle = Oracle(llama, budget=8, resident=())
    oracle.prefill(rng.integers(VOCABULARY, size=400))
    oracle.step(3)
    listed, kept = oracle.heads.tokens(0, 1, 400), oracle.layers[0]
    assert len(listed) == 4 + 8 + (400 - 256 + 1)
    query = oracle.model.query(0, oracle.model.embed(np.array([3])), np.array([400]))[0, 1]
    got = attention(query, kept.keys[listed, 1], kept.values[listed, 1], oracle.model.scale)
    for head in range(2):
        scores = [float(query[head] @ kept.keys[token, 1]) / 4 for token in listed]
        weights = np.exp(scores) / np.exp(scores).sum()
        np.testing.assert_allclose(got[head], weights @ kept.values[listed, 1], atol=1e-5)


# Independence


def test_the_oracle_imports_only_numpy_and_the_standard_library() -> None:
    allowed = {"numpy", *sys.stdlib_module_names}
    sources = [file for file in Path(__file__).parent.glob("*.py") if not file.name.startswith("test_")]
    assert len(sources) >= 6
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not (isinstance(node, ast.ImportFrom) and node.level > 1), source.name
            for name in names:
                assert name.split(".")[0] in allowed, f"{source.name} imports {name}"
