"""Behind a stored prefix only the rest of a prompt is computed, and its logits are those of all of it, bit by bit."""

from pathlib import Path

import numpy as np
import pytest
import torch

from decode_worker.engine import prefill
from decode_worker.engine.engine import Engine
from kvstore_service.client import AdminClient
from tests.support.daemon_process import Daemon

from .conftest import DaemonFactory, EngineFactory, Expected, attached_tokens, greedy, joined, random_ids

STEPS = 8
CHUNK = 512
SHARED = [CHUNK - 1, CHUNK + 300, 2 * CHUNK]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", CHUNK)


def whole_chunks(tokens: int) -> int:
    return tokens // CHUNK * CHUNK


def prefilled(engine: Engine, ids: list[int]) -> tuple[int, torch.Tensor, list[int]]:
    """(tokens that were not computed, logits, greedy continuation)."""
    session, logits = engine.prefill(ids)
    tokens = greedy(engine, session, logits, STEPS)
    engine.close_session(session)
    return session.reused, logits, tokens


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("policy", "storage"), [("full", "float32"), ("qsac", "bfloat16")])
def test_logits_behind_a_stored_prefix_are_those_of_computing_it(
    daemon: Daemon, checkpoint: Path, policy: str, storage: str
) -> None:
    first = random_ids(2 * CHUNK + 350, 1)
    for number, shared in enumerate(SHARED):
        second = first[:shared] + random_ids(700, 100 + number)
        with joined(daemon, checkpoint, policy=policy, storage=storage) as engine:
            computed = engine.compute_only(second)
            assert prefilled(engine, first)[0] == (whole_chunks(len(first)) if number else 0)
            reused, logits, tokens = prefilled(engine, second)
            again = prefilled(engine, second)
        assert reused == whole_chunks(shared)
        assert torch.equal(logits, computed), f"{shared} shared: {(logits - computed).abs().max()}"
        assert again[0] == whole_chunks(len(second) - 1)
        assert torch.equal(again[1], computed), f"{shared} shared"
        assert again[2] == tokens, "the sets that the last prompt token selects are the same ones"


@pytest.mark.timeout(120)
def test_a_reused_prefix_decodes_as_the_oracle_does(engine: EngineFactory, expected: Expected) -> None:
    prompt = random_ids(CHUNK + 376, 11)
    worker = engine(policy="qsac")
    prefilled(worker, prompt[: CHUNK + 256])
    reused, _, tokens = prefilled(worker, prompt)
    assert reused == CHUNK
    assert tokens == expected.tokens(prompt, STEPS, policy="qsac", budget=0.1)


@pytest.mark.timeout(120)
def test_a_prefix_is_the_same_after_a_restart_and_from_nvme(start_daemon: DaemonFactory, checkpoint: Path) -> None:
    daemon = start_daemon()
    prompt = random_ids(3 * CHUNK + 100, 7)
    with joined(daemon, checkpoint) as engine:
        computed = engine.compute_only(prompt)
        prefilled(engine, prompt)
        prefilled(engine, random_ids(3 * CHUNK, 8))  # the tier holds less than this
        reused, logits, _ = prefilled(engine, prompt)
        assert (reused, torch.equal(logits, computed)) == (3 * CHUNK, True)
    daemon.restart()
    with joined(daemon, checkpoint) as engine:
        reused, logits, _ = prefilled(engine, prompt)
        assert (reused, torch.equal(logits, computed)) == (3 * CHUNK, True)


@pytest.mark.timeout(120)
def test_what_one_session_brought_into_dram_is_there_for_others_of_its_prefix(
    start_daemon: DaemonFactory, checkpoint: Path
) -> None:
    daemon = start_daemon("64MiB")
    prompt, settings = random_ids(2 * CHUNK + 1, 7), {"layer0": "offloaded"}
    with joined(daemon, checkpoint, **settings) as engine:
        prefilled(engine, prompt)
    daemon.restart()
    missed, held, texts = [], [], []
    with (
        AdminClient.connect(daemon.socket, daemon.broker) as admin,
        joined(daemon, checkpoint, **settings) as first,
        joined(daemon, checkpoint, **settings) as second,
    ):
        for engine in (first, second):
            texts.append(attached_tokens(engine, prompt, STEPS))
            counted = admin.get_status().counters
            missed.append(counted["extent_misses"])
            held.append(counted["frames_used"])
    assert texts[0] == texts[1]
    assert missed[0] > 0
    assert missed[1] == missed[0]
    assert held[1] == held[0] > 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(2))
def test_prompts_that_share_anything_agree(daemon: Daemon, checkpoint: Path, seed: int) -> None:
    """Chains of packs of other lengths, written by prompts that ended anywhere."""
    rng = np.random.default_rng(seed)
    text = random_ids(3 * CHUNK, 300 + seed)
    with joined(daemon, checkpoint, context=8192) as engine:
        for _ in range(4):
            end = int(rng.integers(1, len(text)))
            prompt = text[:end] + random_ids(int(rng.integers(1, 600)), int(rng.integers(1 << 30)))
            reused, logits, _ = prefilled(engine, prompt)
            assert torch.equal(logits, engine.compute_only(prompt)), (seed, end, reused)


@pytest.mark.timeout(120)
def test_a_chunk_that_prompts_have_stored_in_pieces_is_computed_as_a_whole(daemon: Daemon, checkpoint: Path) -> None:
    """A prompt that ends within a chunk computes it in another shape: other last bits, which its pack keeps."""
    text = random_ids(3 * CHUNK, 21)
    with joined(daemon, checkpoint) as engine:
        for end in (CHUNK + 260, CHUNK + 300, 2 * CHUNK + 1, 2 * CHUNK + 300, 3 * CHUNK):
            reused, logits, _ = prefilled(engine, text[:end])
            assert torch.equal(logits, engine.compute_only(text[:end])), (end, reused)
    assert reused == 2 * CHUNK


@pytest.mark.timeout(120)
def test_tails_that_a_session_sealed_stand_for_no_computed_chunk(daemon: Daemon, checkpoint: Path) -> None:
    """Decode steps of full attention seal exact KV, but a token at a time: other last bits."""
    prompt = random_ids(CHUNK + 250, 22)
    with joined(daemon, checkpoint, policy="full") as engine:
        session, _ = engine.prefill(prompt)
        for token in (rest := random_ids(2 * CHUNK, 23)):
            engine.step([session], [token])
        assert session.stored >= 2 * CHUNK
        engine.close_session(session)
        continued = [*prompt, *rest]
        reused, logits, _ = prefilled(engine, continued)
        assert torch.equal(logits, engine.compute_only(continued)), reused
        assert prefilled(engine, continued)[0] == 3 * CHUNK
