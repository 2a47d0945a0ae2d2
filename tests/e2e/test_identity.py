"""What KV was computed under is part of a pack's identity: a hit is exact, or of the same settings, or it is a miss."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decode_worker.engine.engine import Engine
from decode_worker.engine.prefix import EXACT, HASH_BLOCK_TOKENS, candidates, pack_bounds, token_digest
from decode_worker.engine.provenance import provenance
from kvstore_service.daemon.store.prefixes import CANDIDATES_MAX
from tests.support.daemon_process import Daemon

from .conftest import PACK_TOKENS, EngineFactory, greedy, joined, random_ids

PROMPT, STEPS = 600, 370  # two blocks are stored by the prefill, a third by one seal
SPARSE = {"policy": "qsac", "eta": 0.5, "budget": 32, "sink": 4}


def sealed_conversation(worker: Engine, seed: int) -> list[int]:
    """Ids of a prompt and its continuation, decoded until its first tail is sealed."""
    print(f"seed {seed}")
    ids = random_ids(PROMPT, seed)
    session, logits = worker.prefill(ids)
    stored = session.stored
    greedy(worker, session, logits, STEPS)
    assert session.stored == stored + HASH_BLOCK_TOKENS, "a tail was sealed"
    conversation = list(session.tokens)
    worker.close_session(session)
    return conversation


def attached_logits(worker: Engine, ids: list[int]) -> tuple[int, torch.Tensor]:
    """(tokens found in the store, logits after the last id)."""
    session, rest = worker.attach(ids)
    found = session.stored
    for token in rest:
        logits = worker.step([session], [token])[0]
    worker.close_session(session)
    return found, logits


@pytest.mark.timeout(90)
def test_a_full_session_never_attaches_what_a_sparse_one_has_computed(engine: EngineFactory) -> None:
    conversation = sealed_conversation(engine(**SPARSE), 81)
    full = engine(policy="full")
    found, logits = attached_logits(full, conversation)
    print(f"largest difference {(logits - full.compute_only(conversation)).abs().max():.5f}")
    assert found == PROMPT // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS, "the sealed tail is a miss, the prefill a hit"
    torch.testing.assert_close(logits, full.compute_only(conversation), atol=1e-3, rtol=1e-3)


@pytest.mark.timeout(90)
def test_sealed_tails_are_found_by_sessions_of_the_same_settings_and_no_others(engine: EngineFactory) -> None:
    conversation = sealed_conversation(engine(**SPARSE), 82)
    whole = len(conversation) // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
    exact = PROMPT // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
    again, _ = engine(**SPARSE).attach(conversation)
    assert again.stored == whole
    for other in ({"budget": 48}, {"eta": 0.6}, {"query": "true"}, {"recent": 80}, {"policy": "infinigen"}):
        session, _ = engine(**SPARSE | other).attach(conversation)
        assert session.stored == exact, other


@pytest.mark.timeout(90)
def test_what_a_full_session_seals_serves_full_sessions_alone(engine: EngineFactory) -> None:
    """Its steps attend to everything, but their products have other last bits than a prefill's."""
    full = engine(policy="full")
    conversation = sealed_conversation(full, 83)
    whole = len(conversation) // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS
    found, logits = attached_logits(engine(policy="full"), conversation)
    assert found == whole
    torch.testing.assert_close(logits, full.compute_only(conversation), atol=1e-3, rtol=1e-3)
    sparse, _ = engine(**SPARSE).attach(conversation)
    assert sparse.stored == PROMPT // HASH_BLOCK_TOKENS * HASH_BLOCK_TOKENS


@pytest.mark.timeout(90)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_what_a_full_session_seals_changes_no_bit_of_anothers_prompt(
    tmp_path: Path, checkpoint: Path, compute: str
) -> None:
    ids = random_ids(1480, 87)

    def logits(steps: int) -> list[torch.Tensor]:
        options = ("--nvme-bytes=1GiB", "--copy-threads=1", f"--pack-tokens={PACK_TOKENS}")
        with (
            Daemon(tmp_path / str(steps), options=options) as daemon,
            joined(daemon, checkpoint, policy="full", compute=compute, storage=compute) as worker,
        ):
            session, _ = worker.prefill(ids[:1024])
            for token in ids[1024 : 1024 + steps]:
                worker.step([session], [token])
                if session.sealing is not None:
                    session.sealing.finish()
            assert session.stored == (1280 if steps else 1024)
            worker.close_session(session)
            session, first = worker.prefill(ids[:1300])
            return [first, *(worker.step([session], [token])[0] for token in ids[1300:1308])]

    assert all(torch.equal(one, other) for one, other in zip(logits(0), logits(456), strict=True))


@pytest.mark.timeout(60)
def test_every_setting_that_a_selection_depends_on_is_in_the_identity(engine: EngineFactory) -> None:
    worker = engine(**SPARSE)
    ids = random_ids(HASH_BLOCK_TOKENS, 84)
    digests = {token_digest(ids), token_digest(ids, provenance(worker.config, worker.policy))}
    for change in (
        {"retriever": "hash"}, {"query": "true"}, {"budget": 0.2}, {"sink": 5}, {"recent": 65}, {"tail": 800},
        {"slack": 0.5}, {"eta": 0.4}, {"cos_floor": 0.1}, {"layer0": "offloaded"}, {"order": "token"},
        {"stale": "fail"}, {"policy": "infinigen"}, {"weights": "int8"},
    ):  # fmt: skip
        other = engine(**SPARSE | change)
        digests.add(token_digest(ids, provenance(other.config, other.policy)))
        other.close()
    assert len(digests) == 16, "each is another identity"
    same = provenance(replace(worker.config, wait_ms=77, threads=2, seed=9, slots=3), worker.policy)
    assert token_digest(ids, same) in digests, "what changes no number is no part of it"
    full = engine(policy="full")
    steps = {provenance(replace(full.config, weights=weights), full.policy) for weights in ("compute", "int8")}
    assert len(steps | {EXACT}) == 3, "a step's products are no prefill's"


def test_a_dense_lookup_asks_for_exact_packs_only_and_a_sparse_one_prefers_them() -> None:
    ids = random_ids(4 * HASH_BLOCK_TOKENS, 85)
    dense = candidates(ids, 2 * HASH_BLOCK_TOKENS)
    sparse = candidates(ids, 2 * HASH_BLOCK_TOKENS, b"{}")
    assert sparse[: len(dense)] == dense
    assert [item.first_token for item in sparse[len(dense) :]] == [0, 256, 512, 768]
    assert all(item.tokens == HASH_BLOCK_TOKENS for item in sparse[len(dense) :])


def test_a_lookup_asks_for_every_pack_that_a_prompt_can_be_made_of() -> None:
    """Wherever prompts before it ended; and for a million tokens in one call."""
    ids = random_ids(13 * HASH_BLOCK_TOKENS, 86)
    asked = {(item.first_token, item.tokens) for item in candidates(ids, 4 * HASH_BLOCK_TOKENS)}
    made = {
        pack
        for end in range(len(ids) + 1)
        for stored in range(0, end + 1, HASH_BLOCK_TOKENS)
        for pack in pack_bounds(end, 4 * HASH_BLOCK_TOKENS, stored)
    }
    assert asked == made
    assert len(candidates(range((1 << 20) + 4096), 1024, b"{}")) <= CANDIDATES_MAX
