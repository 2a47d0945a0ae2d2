"""Whatever a worker grades as important, it decodes the same, and finds in DRAM what it graded."""

from pathlib import Path

import pytest
import torch

from decode_worker.importance import IMPORTANCES
from kvstore_service.client import AdminClient
from tests.support.daemon_process import Daemon

from .conftest import PACK_TOKENS, joined, random_ids

PROMPT, STEPS = 1400, 24


def decoded(directory: Path, checkpoint: Path, dram: str, **settings: str) -> tuple[torch.Tensor, dict[str, int]]:
    """Logits of every step in a fresh daemon, and what that daemon counted."""
    directory.mkdir()
    options = ("--nvme-bytes=1GiB", "--copy-threads=1", f"--pack-tokens={PACK_TOKENS}")
    with Daemon(directory, dram, options=options) as daemon:
        with joined(daemon, checkpoint, **settings) as engine:
            session, logits = engine.prefill(random_ids(PROMPT, 17))
            rows = [logits]
            for _ in range(STEPS):
                rows.append(engine.step([session], [int(rows[-1].argmax())])[0])
            engine.close_session(session)
        with AdminClient.connect(daemon.socket, daemon.broker) as admin:
            return torch.stack(rows), dict(admin.get_status().counters)


@pytest.mark.parametrize("dram", ["4MiB", "64MiB"])
@pytest.mark.parametrize("kind", ["model", "int8"])
def test_importance_changes_no_logit(tmp_path: Path, checkpoint: Path, dram: str, kind: str) -> None:
    settings = {"storage": "bfloat16", "record_kind": kind}
    logits, none = decoded(tmp_path / "none", checkpoint, dram, importance="none", **settings)
    assert none["seed_bytes"] == none["warm_bytes"] == 0
    for importance in sorted(set(IMPORTANCES.names) - {"none"}):
        other, counted = decoded(tmp_path / importance, checkpoint, dram, importance=importance, **settings)
        assert torch.equal(other, logits), importance
        assert (counted["seed_bytes"] > 0) == (importance != "hint"), importance
        if dram == "64MiB":  # all of it has room
            assert counted["nvme_read_bytes"] < none["nvme_read_bytes"] or importance == "hint"
