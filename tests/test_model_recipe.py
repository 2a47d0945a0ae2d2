"""The retriever's recipe: documents, splits, tokenizer and what the shipped model can do."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from itertools import pairwise

import pytest

from decode_worker.demo.document import FACT_TOKENS, fact_words, load_words, words_of
from models import corpus

SPLITS = ("train", "eval", "demo")
MODEL = corpus.RETRIEVER


@pytest.fixture(scope="module")
def words() -> list[str]:
    return load_words(MODEL)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("tokens", "facts"), [(150, 20), (2048, 128), (70_000, 100)])
def test_document_has_the_tokens_and_facts_asked_for(words, split, tokens, facts):
    document = corpus.make_document(words, tokens, facts, 7, split)
    assert len(words_of(document.text)) == tokens
    assert len(document.facts) == facts
    lines = document.text.splitlines()
    assert [line for line in lines if line in {f.line for f in document.facts}] == [
        fact.line for fact in document.facts
    ]


def test_document_depends_on_seed_and_split_only(words):
    build = corpus.make_document
    assert build(words, 1000, 20, 1, "eval") == build(words, 1000, 20, 1, "eval")
    assert build(words, 1000, 20, 1, "eval") != build(words, 1000, 20, 2, "eval")
    assert build(words, 1000, 20, 1, "eval").facts != build(words, 1000, 20, 1, "train").facts


def test_facts_are_unique_and_their_keys_unambiguous(words):
    document = corpus.make_document(words, 16_000, 128, 3, "eval")
    keys = [fact.key for fact in document.facts]
    values = [value for fact in document.facts for value in fact.values]
    assert len(set(keys)) == len(keys)
    assert len(set(values)) == len(values)
    text = words_of(document.text)
    questions = Counter(key for key, colon in pairwise(text) if colon == ":")
    assert all(questions[key] == 1 for key in keys)


def test_facts_lie_at_uniform_depth(words):
    documents = [corpus.make_document(words, 4000, 25, seed, "eval") for seed in range(20)]
    depths = [fact.depth for document in documents for fact in document.facts]
    assert statistics.mean(depths) == pytest.approx(0.5, abs=0.02)
    tenths = [sum(int(depth * 10) == tenth for depth in depths) for tenth in range(10)]
    assert max(tenths) < 1.3 * min(tenths)


def test_depth_is_the_place_of_the_key(words):
    document = corpus.make_document(words, 4000, 25, 5, "demo")
    text = words_of(document.text)
    for fact in document.facts:
        place = round(fact.depth * 4000)
        assert text[place : place + FACT_TOKENS] == words_of(fact.line)


def test_keys_and_values_are_many_and_disjoint(words):
    keys, values = fact_words(words)
    assert len(set(keys)) >= 1000
    assert len(set(values)) >= 1000
    assert not set(keys) & set(values)


def test_splits_share_no_paragraph():
    def long_paragraphs(split: corpus.Split) -> set[str]:
        found = (" ".join(words_of(" ".join(p))) for p in corpus.paragraphs(split))
        return {paragraph for paragraph in found if len(paragraph.split()) >= 12}

    train, evaluation, demo = map(long_paragraphs, SPLITS)
    assert min(len(train), len(evaluation), len(demo)) > 100
    assert not train & evaluation
    assert not train & demo
    assert not evaluation & demo


@pytest.mark.parametrize("facts", [0, 17, 5000])
def test_facts_that_do_not_fit_are_refused(words, facts):
    with pytest.raises(ValueError, match="facts"):
        corpus.make_document(words, 100 if facts < 100 else 100_000, facts, 0, "eval")


def test_config_is_a_small_grouped_query_llama():
    config = json.loads((MODEL / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert config["num_hidden_layers"] >= 4
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] == 131_072
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 16 << 20


def test_tokenizer_round_trips_facts_and_agrees_with_the_corpus(words):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    document = corpus.make_document(words, 3000, 50, 11, "eval")
    for fact in document.facts:
        ids = tokenizer.encode(fact.line).ids
        assert len(ids) == FACT_TOKENS
        assert tokenizer.decode(ids) == fact.line
    known = set(words)
    expected = [word if word in known else "[UNK]" for word in words_of(document.text)]
    assert tokenizer.encode(document.text).tokens == expected


def test_shipped_model_answers_at_2k():
    torch = pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    pytest.importorskip("tokenizers")
    from models import evaluate

    network, tokenizer = evaluate.load(MODEL)
    document = corpus.make_document(load_words(MODEL), 2048, 64, 1, "eval")
    prefix = evaluate.prefill(network, torch.tensor(tokenizer.encode(document.text).ids))
    for budget in (1.0, 0.1):
        result = evaluate.ask(network, tokenizer, prefix, document.facts, budget)
        assert result.asked == 64
        assert result.right / result.asked >= 0.9


def test_network_agrees_with_transformers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from models import evaluate

    network, tokenizer = evaluate.load(MODEL)
    reference = transformers.AutoModelForCausalLM.from_pretrained(MODEL).eval()
    document = corpus.make_document(load_words(MODEL), 400, 20, 2, "eval")
    ids = torch.tensor(tokenizer.encode(document.text + document.facts[7].question).ids)
    decoder = evaluate.Decoder(network, evaluate.prefill(network, ids[:-2]))
    ours = [decoder.step(token[None])[0] for token in ids[-2:]]
    with torch.inference_mode():
        theirs = reference(ids[None]).logits[0, -2:]
    torch.testing.assert_close(torch.stack(ours), theirs, rtol=1e-3, atol=1e-3)
