"""Prefill keeps one layer's KV at a time: afterwards the worker holds a window and an index, not the cache."""

import json
from pathlib import Path

import pytest

from tests.support.daemon_process import Daemon

from .conftest import random_checkpoint, random_ids, worker_process, worker_settings

MIB = 1 << 20
TOKENS, LAYERS, KV_HEADS, HEAD_DIM = 8192, 16, 4, 128
ALLOWANCE_BYTES = 64 * MIB


@pytest.mark.timeout(180)
def test_a_worker_s_memory_after_prefill_is_window_and_index(tmp_path: Path) -> None:
    seed = 91
    print(f"seed {seed}")
    checkpoint = random_checkpoint(
        tmp_path / "model", seed,
        hidden_size=64, intermediate_size=64, num_hidden_layers=LAYERS,
        num_attention_heads=KV_HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
    )  # fmt: skip
    options = ("--nvme-bytes=1GiB", "--copy-threads=1")
    with Daemon(tmp_path, "64MiB", options=options) as daemon:
        settings = worker_settings(
            daemon,
            checkpoint,
            retriever="hash",
            budget=0.05,
            storage="bfloat16",
            context=TOKENS + 256,
            wait_ms=20_000,
        )
        with worker_process({"config": settings, "prompt": random_ids(TOKENS, seed), "steps": 1}) as process:
            assert process.stdout is not None
            figures: dict[str, int] = json.loads(process.stdout.readline())
    print({name: f"{value / MIB:.1f} MiB" for name, value in figures.items()})
    kv_bytes = LAYERS * KV_HEADS * 2 * HEAD_DIM * 2 * TOKENS
    assert kv_bytes >= 256 * MIB
    assert figures["offloaded_bytes"] == kv_bytes * (LAYERS - 1) // LAYERS
    grown = figures["after_bytes"] - figures["before_bytes"]
    assert grown <= figures["device_bytes"] + figures["index_bytes"] + ALLOWANCE_BYTES
