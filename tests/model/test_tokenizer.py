"""Tokenizer: round trips, streamed text, end-of-sequence ids and mismatches."""

import json
import random
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from decode_worker.model.errors import CheckpointError
from decode_worker.model.tokenizer import Tokenizer

CORPUS = ["the gate lets water into the channel", "größer, schöner; 水門は水を入れる 🌊👩‍👩‍👧"] * 4
TEXTS = [*CORPUS[:2], "", " leading and  double  spaces ", "emoji 🏞️ and accents é ü", "水 門"]
VOCAB = 400


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE, as in Llama 3 and Qwen."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece-style BPE whose unknown characters become bytes, as in Llama 2 and Mistral."""
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained.train_from_iterator([CORPUS[0]], trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special))
    state = json.loads(trained.to_str())
    state["model"]["byte_fallback"] = True
    state["added_tokens"] = state["added_tokens"][:3]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    return tokenizer


def write(directory: Path, tokenizer: tokenizers.Tokenizer, **configs: object) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, value in ({"config": {}} | configs).items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return directory


@pytest.fixture(params=[byte_level, byte_fallback])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(write(tmp_path, request.param()), VOCAB)


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encoding_and_streaming(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) + stream.finish() == text


@pytest.mark.parametrize("seed", range(20))
def test_streamed_text_equals_the_whole_for_random_ids(seed: int, tokenizer: Tokenizer) -> None:
    choose = random.Random(seed)
    ids: list[int] = []
    while len(ids) < 60:
        ids += tokenizer.encode(choose.choice(TEXTS), add_special_tokens=choose.random() < 0.5)
    stream = tokenizer.stream()
    streamed = "".join(stream.push(token) for token in ids) + stream.finish()
    assert streamed == tokenizer.decode(ids), f"seed {seed}"


def test_bytes_that_never_form_a_character_are_shown(tokenizer: Tokenizer) -> None:
    water = tokenizer.encode("🏞", add_special_tokens=False)
    broken = [next(i for i in water if tokenizer.decode([i]).endswith("\ufffd"))] * 100
    stream = tokenizer.stream()
    assert "\ufffd" in "".join(stream.push(token) for token in broken)
    assert len(stream._pending) < 20


def test_special_tokens_have_no_text(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    assert [stream.push(1) for _ in range(100)] == [""] * 100
    assert len(stream._pending) < 20
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("configs", "expected"),
    [
        ({"config": {"eos_token_id": 1}}, {1}),
        ({"config": {"eos_token_id": [1, 7]}}, {1, 7}),
        ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [3, 4]}}, {3, 4}),
        ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": None}}, {1}),
        ({}, set()),
    ],
)
def test_eos_ids(configs: dict[str, object], expected: set[int], tmp_path: Path) -> None:
    assert Tokenizer.load(write(tmp_path, byte_level(), **configs), VOCAB).eos_ids == expected


@pytest.mark.parametrize("eos", [VOCAB, -1, "</s>", [1, None]])
def test_bad_eos_ids(eos: object, tmp_path: Path) -> None:
    directory = write(tmp_path, byte_level(), config={"eos_token_id": eos})
    with pytest.raises(CheckpointError, match="eos_token_id"):
        Tokenizer.load(directory, VOCAB)


def test_missing_broken_and_mismatching_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        Tokenizer.load(tmp_path, VOCAB)
    write(tmp_path, byte_level())
    with pytest.raises(CheckpointError, match=r"token id \d+, but vocab_size .* is 300"):
        Tokenizer.load(tmp_path, 300)
    Tokenizer.load(tmp_path, 100_000)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        Tokenizer.load(tmp_path, VOCAB)
