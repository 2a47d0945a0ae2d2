"""The measurements behind a profile, on a tiny random checkpoint, against dense references."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from decode_worker.calibration import measure
from decode_worker.calibration.profile import Profile
from decode_worker.model.checkpoint import Checkpoint
from decode_worker.model.transformer import Transformer
from decode_worker.retrieval.hash import encode_reference

LAYERS, HEADS, GROUP, DIM, HIDDEN, FFN, VOCAB = 3, 2, 2, 16, 32, 48, 61
STORED = 96
LIMITS = measure.Limits(sink=2, recent=8, storage=torch.float32)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tensors are far too small to share out."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Transformer:
    from safetensors.torch import save_file

    directory = tmp_path_factory.mktemp("checkpoint")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS * GROUP,
        "num_key_value_heads": HEADS,
        "head_dim": DIM,
        "max_position_embeddings": 256,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    q, kv = HEADS * GROUP * DIM, HEADS * DIM
    shapes = {"self_attn.q_proj": (q, HIDDEN), "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN)}
    shapes |= {"self_attn.o_proj": (HIDDEN, q), "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN)}
    shapes |= {"mlp.down_proj": (HIDDEN, FFN), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    random = torch.Generator().manual_seed(0)
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    save_file({n: 0.4 * torch.randn(s, generator=random) for n, s in names.items()}, directory / "model.safetensors")
    return Transformer.load(Checkpoint.open(directory), 256)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return np.random.default_rng(1).integers(0, VOCAB, STORED).tolist()


@pytest.fixture(scope="module")
def case(model, tokens) -> measure.Case:
    pairs = [([3, 4], [5, 6, 7]), ([8], [9, 10, 11]), ([12, 13, 14], [15, 16])]
    return measure.Case(measure.prefill(model, tokens, torch.float32), measure.Questions.of(pairs))


def dense_logits(model: Transformer, ids: list[int], layer: int, heads: list[int]) -> torch.Tensor:
    """The whole sequence at once under a mask; from STORED on, `heads` of `layer` miss all but sinks and recent."""
    positions, x = torch.arange(len(ids)), model.embed(torch.tensor(ids))
    token, row = positions[None], positions[:, None]
    near = (token < LIMITS.sink) | (token >= row - LIMITS.recent)
    for at in range(LAYERS):
        q, k, v = model.qkv(at, x, positions)
        mask = (token <= row).expand(HEADS * GROUP, -1, -1).clone()
        if at == layer:
            mask[heads] &= near | (row < STORED) | (token >= STORED)
        k, v = (part.repeat_interleave(GROUP, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k).mul(model.scale).masked_fill(~mask, -math.inf)
        x = model.finish(at, x, torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return model.logits(x)


@pytest.mark.parametrize(("layer", "heads"), [(0, []), (0, [1]), (1, [2, 3]), (2, [0])])
def test_an_ablated_head_sees_sinks_and_recent_tokens_only(model, tokens, case, layer, heads):
    ablated = torch.zeros(LAYERS, HEADS * GROUP, dtype=torch.bool)
    ablated[layer, heads] = True
    grouped = ablated.view(LAYERS, HEADS, GROUP)
    found = measure.ask(model, case, measure.ablate(case, grouped, LIMITS))
    losses, right = [], []
    for ids, targets, answer in zip(case.questions.ids, case.questions.targets, case.questions.answer, strict=True):
        logits = dense_logits(model, [*tokens, *ids.tolist()], layer, heads)[STORED:][answer]
        losses.append(torch.nn.functional.cross_entropy(logits, targets[answer], reduction="none"))
        right.append(bool((logits.argmax(-1) == targets[answer]).all()))
    assert found.loss == pytest.approx(float(torch.cat(losses).mean()), rel=1e-4)
    assert found.accuracy == pytest.approx(np.mean(right))


def test_questions_are_padded_behind_their_end(case):
    questions = case.questions
    assert questions.ids.shape == (3, 4)
    assert questions.fed.sum(1).tolist() == [4, 3, 4]
    assert [row[mask].tolist() for row, mask in zip(questions.targets, questions.answer, strict=True)] == [
        [5, 6, 7],
        [9, 10, 11],
        [15, 16],
    ]


def test_importance_lies_between_0_and_1(model, case):
    kv, query = measure.importance(model, [case], LIMITS)
    assert (kv.shape, query.shape) == ((LAYERS, HEADS), (LAYERS, HEADS * GROUP))
    for table in (kv, query):
        assert table.min() >= 0
        assert table.max() == 1
    assert (measure.relative(np.array([[-1.0, 0.0]])) == 1).all()


def test_groups_are_ablated_together():
    order = measure.ablation_order(np.random.default_rng(2), LAYERS, HEADS, GROUP)
    assert len(set(order)) == LAYERS * HEADS * GROUP
    assert all(len({place[:2] for place in order[i : i + GROUP]}) == 1 for i in range(0, len(order), GROUP))


def reference_similarity(query, label, weights, floor) -> float:
    """docs/qsac.md step 3 for one KV head: query and label [g, d]."""
    cosines = [float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) for a, b in zip(query, label, strict=True)]
    if min(cosines) <= floor or not weights.any():
        return min(cosines)
    return sum(weights) / sum(w / c for w, c in zip(weights, cosines, strict=True) if w)


def test_mean_similarity_is_the_formulas(model, case, rng):
    weights = rng.random((LAYERS, HEADS * GROUP)).astype(np.float32)
    weights[0, 1] = 0
    profile = replace(Profile.default(model.config), query_importance=weights)
    found = measure.mean_similarity(model, [case], profile, LIMITS)
    fed = case.questions.fed
    for layer, query in enumerate(measure.speculative_queries(model, case)):
        grouped = query.unflatten(2, (HEADS, GROUP)).numpy()
        for head in range(HEADS):
            w = weights[layer].reshape(HEADS, GROUP)[head]
            values = [
                reference_similarity(grouped[b, t, head], grouped[b, t - 1, head], w, LIMITS.cos_floor)
                for b, t in fed.nonzero().tolist()
                if t
            ]
            assert found[layer, head] == pytest.approx(np.mean(values), abs=1e-4)


def test_the_simulated_selection_is_the_retrievers(model, case):
    profile, layer, head = Profile.default(model.config), 1, 1
    query, keys = measure.speculative_queries(model, case)[layer], case.prefix[layer][0]
    distance = measure.hash_distance(profile, layer, query, keys)
    limit = measure.selectable(STORED, STORED, LIMITS)
    found = measure.nearest(distance, limit, LIMITS)[0, 0, head].nonzero().flatten()
    projection, centre = (x[layer, head] for x in profile.hash_parameters(LAYERS, HEADS, DIM))
    asked = encode_reference(query[0, 0].unflatten(0, (HEADS, GROUP))[head].numpy(), projection, centre)
    codes = encode_reference(keys[head].numpy(), projection, centre)
    differing = np.bitwise_count(codes[:, None] ^ asked).sum(axis=(1, 2), dtype=np.int64)[LIMITS.sink : limit]
    assert found.tolist() == sorted((LIMITS.sink + np.argsort(differing, kind="stable")[:10]).tolist())


def test_simulated_hits_keep_the_set_and_misses_replace_it(model, case):
    strict = measure.Simulation(case, replace(Profile.default(model.config), eta=1.0), LIMITS)
    lenient = measure.Simulation(case, replace(Profile.default(model.config), eta=-1.0), LIMITS)
    query = measure.speculative_queries(model, case)[1]
    assert strict(0, query) is None
    seen, kept = strict(1, query), lenient(1, query)
    assert (strict.hits, strict.lookups) == (0, 8 * HEADS)
    assert (lenient.hits, lenient.lookups) == (8 * HEADS, 8 * HEADS)
    for step in range(4):
        limit = STORED + step - LIMITS.recent
        assert seen[..., step, limit:].all()
        assert (seen[..., step, LIMITS.sink : limit].sum(-1) == 10).all()
        assert (kept[..., step, :] == kept[..., 0, :]).all()


def test_everything_in_the_budget_is_full_attention(model, case):
    whole = measure.Simulation(case, Profile.default(model.config), replace(LIMITS, budget=1.0))
    assert measure.ask(model, case, whole).loss == pytest.approx(
        measure.ask(model, case, measure.everything).loss, rel=1e-5
    )


def test_the_most_cautious_point_that_is_accurate_and_mostly_hits_is_chosen():
    points = [measure.Point(0.9, 3, 1.0, 0.3), measure.Point(0.8, 3, 0.99, 0.4), measure.Point(0.7, 3, 0.8, 0.9)]
    assert measure.choose(points, 0.985) == points[1], "where none mostly hits, the accurate one with most hits"
    assert measure.choose(points[2:], 0.985) == points[2], "where none is accurate, the most accurate"
    mostly = [
        measure.Point(0.9, 2, 0.99, 0.8),
        measure.Point(0.9, 1, 0.99, 0.6),
        measure.Point(0.8, 1, 0.99, 0.7),
    ]
    assert measure.choose([*points, *mostly], 0.985) == mostly[1]


def test_the_file_round_trips(model, case, tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "ETAS", (0.9, 0.5))
    monkeypatch.setattr(measure, "POWERS", (3.0, 0.0))
    profile, points, full = measure.measure_profile(model, [case], LIMITS)
    assert 0 <= full <= 1
    assert (profile.eta, profile.p) in {(point.eta, point.p) for point in points}
    measure.save(profile, tmp_path / "headgate_profile.json")
    loaded = Profile.load("auto", model.config, directory=tmp_path)
    for name in ("query_importance", "kv_importance", "mean_similarity"):
        np.testing.assert_allclose(getattr(loaded, name), getattr(profile, name), atol=5e-5)
    assert (loaded.eta, loaded.p, loaded.margin) == (profile.eta, profile.p, profile.margin)
    assert loaded.projection is None
