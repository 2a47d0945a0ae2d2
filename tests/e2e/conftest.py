"""A random checkpoint, a real daemon and engines joined to it."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from decode_worker.config import WorkerConfig
from decode_worker.engine.engine import Engine
from tests.daemon_process import Daemon

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 4, 2, 64, 256
PACK_TOKENS = 512

EngineFactory = Callable[..., Engine]


def write_tokenizer(directory: Path, vocab: int) -> None:
    """A word-level tokenizer whose word `w17` is token 17."""
    words = {f"w{token}": token for token in range(vocab)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


def random_checkpoint(directory: Path, seed: int, **sizes: int) -> Path:
    """A Llama whose attention is neither flat nor one-hot, so that selections matter to the logits."""
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": Q_HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "max_position_embeddings": 32768,
            "rope_theta": 1e6,
        }
        | sizes
    )
    model = transformers.LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise * 1.3 * parameter.shape[1] ** -0.5)
    model.save_pretrained(directory)
    write_tokenizer(directory, config.vocab_size)
    return directory


def random_ids(count: int, seed: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=7)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon that takes faults. Its DRAM tier is smaller than the tests' KV, so decoding reads NVMe."""
    options = ("--nvme-bytes=1GiB", "--copy-threads=1", f"--pack-tokens={PACK_TOKENS}")
    with Daemon(tmp_path, "4MiB", options=options, faulty=True) as running:
        yield running  # type: ignore[misc]


@pytest.fixture
def engine(daemon: Daemon, checkpoint: Path) -> Iterator[EngineFactory]:
    """Makes engines: float32 storage, small budget, settings as given; all are closed at the end."""
    with ExitStack() as stack:

        def make(**settings: Any) -> Engine:
            values: dict[str, Any] = {
                "model": checkpoint,
                "socket": daemon.socket,
                "broker": daemon.broker,
                "storage": "float32",
                "context": 4096,
                "profile": "off",
                "wait_ms": 5000,
            }
            return stack.enter_context(closing(Engine(WorkerConfig(**values | settings))))

        yield make
