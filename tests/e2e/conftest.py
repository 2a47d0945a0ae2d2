"""A random checkpoint, a real daemon, engines joined to it, and what the oracle says."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from oracle.qsac import Oracle

from decode_worker.config import WorkerConfig
from decode_worker.engine.engine import Engine
from decode_worker.engine.sealing import SEAL_STEPS
from decode_worker.engine.session import Session
from kvstore_service.client import StoreError
from tests.support.daemon_process import Daemon

ROOT = Path(__file__).parents[2]
LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 4, 4, 2, 64, 256
PACK_TOKENS = 512

EngineFactory = Callable[..., Engine]
DaemonFactory = Callable[..., Daemon]


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


def random_checkpoint(directory: Path, seed: int, **sizes: int | None) -> Path:
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


def worker_settings(daemon: Daemon, checkpoint: Path, **settings: Any) -> dict[str, Any]:
    """float32 storage, exact selection of a tenth, no profile, 5 s to wait; `settings` replace any of it."""
    defaults = {
        "model": str(checkpoint),
        "socket": daemon.socket,
        "broker": daemon.broker,
        "retriever": "exact",
        "budget": 0.1,
        "storage": "float32",
        "context": 4096,
        "profile": "off",
        "wait_ms": 5000,
    }
    return defaults | settings


@contextmanager
def joined(daemon: Daemon, checkpoint: Path, **settings: Any) -> Iterator[Engine]:
    """An engine for as long as the block lasts."""
    with closing(Engine(WorkerConfig(**worker_settings(daemon, checkpoint, **settings)))) as engine:
        yield engine


def greedy(engine: Engine, session: Session, logits: torch.Tensor, count: int) -> list[int]:
    """`count` tokens, the first of them from `logits` [vocab], each of them processed.

    A seal is as fast as a step, whatever else the machine does: N grows when its time has come."""
    tokens = []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = engine.step([session], tokens[-1:])[0]
        if session.sealing is not None:
            with suppress(StoreError):  # the next step meets it
                session.sealing.finish()
    return tokens


def attached_tokens(engine: Engine, ids: Sequence[int], count: int) -> list[int]:
    """Attaches what is stored of `ids`, processes the rest, and continues with `count` greedy tokens."""
    session, rest = engine.attach(ids)
    for token in rest:
        logits = engine.step([session], [token])[0]
    tokens = greedy(engine, session, logits, count)
    engine.close_session(session)
    return tokens


@contextmanager
def worker_process(
    order: dict[str, Any], python: str = sys.executable, **options: Any
) -> Iterator["subprocess.Popen[str]"]:
    """tests/e2e/worker_process.py under an order, killed at the end; `options` are Popen's."""
    process = subprocess.Popen(
        [python, "-m", "tests.e2e.worker_process"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, **options,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait(10)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def read_tokens(process: "subprocess.Popen[str]", count: int) -> list[int]:
    """The next `count` tokens of a worker process."""
    assert process.stdout is not None
    lines = (json.loads(line) for line in process.stdout)
    tokens: list[int] = []
    while len(tokens) < count:
        line = next(lines)
        if "token" in line:
            tokens.append(line["token"])
    return tokens


class Expected:
    """What the oracle decodes; a prompt is computed once, and a case once for all tests that share it."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self._prefill = cache(lambda ids: Oracle(checkpoint).model.prefill(np.asarray(ids)))
        self._known: dict[str, list[int]] = {}

    def oracle(self, **settings: Any) -> Oracle:
        oracle = Oracle(self._checkpoint, **settings)
        oracle.model.prefill = lambda ids: self._prefill(tuple(int(token) for token in ids))
        return oracle

    def tokens(self, prompt: list[int], count: int, **settings: Any) -> list[int]:
        case = repr((prompt, count, sorted(settings.items())))
        if case not in self._known:
            oracle = self.oracle(auto_seal=False, **settings)
            self._known[case] = with_seals(oracle, oracle.prefill(prompt), count)
        return self._known[case]


def with_seals(oracle: Oracle, logits: NDArray[np.float32], count: int) -> list[int]:
    """`count` greedy tokens of an oracle that seals SEAL_STEPS steps after a seal is due."""
    tokens: list[int] = []
    for _ in range(count):
        if tokens:
            logits = oracle.step(tokens[-1])
            if oracle.heads.seal_due(oracle.position - 1 - SEAL_STEPS):
                oracle.seal()
        tokens.append(int(np.argmax(logits)))
    return tokens


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("checkpoint"), seed=7)


@pytest.fixture(scope="session")
def expected(checkpoint: Path) -> Expected:
    return Expected(checkpoint)


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[DaemonFactory]:
    """Starts daemons that take faults; all are stopped at the end."""
    with ExitStack() as stack:

        def start(dram_bytes: str = "4MiB", **settings: Any) -> Daemon:
            options = ("--nvme-bytes=1GiB", "--copy-threads=1", f"--pack-tokens={PACK_TOKENS}")
            return stack.enter_context(Daemon(tmp_path, dram_bytes, options=options, faulty=True, **settings))  # type: ignore[return-value]

        yield start


@pytest.fixture
def daemon(start_daemon: DaemonFactory) -> Daemon:
    """A daemon that takes faults. Its DRAM tier is smaller than the tests' KV, so decoding reads NVMe."""
    return start_daemon()


@pytest.fixture
def engine(daemon: Daemon, checkpoint: Path) -> Iterator[EngineFactory]:
    """Makes engines with `worker_settings`; all are closed at the end."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(joined(daemon, checkpoint, **settings))
