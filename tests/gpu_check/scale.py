"""How much of everything: on a device, and where the check itself is rehearsed."""

from __future__ import annotations

from dataclasses import dataclass

from decode_worker.policy.presets import PRESETS
from decode_worker.policy.settings import STAGGER
from decode_worker.synthetic.checkpoint import B8, Shape

DTYPES = ("float32", "bfloat16", "float16")
# Least tails: the session of the longest prompt is sealed after two steps, and its index grows.
SETTINGS = {
    "retriever": "hash", "recent": 1, "tail": 256 + STAGGER + 2, "eta": 0.1, "budget": 0.1, "context": 4096,
    "profile": "off", "storage": "float32", "wait_ms": 60_000,
}  # fmt: skip
ALWAYS_MISS = {"eta": 1.0}


@dataclass(frozen=True)
class Scale:
    """`heads`: query heads per KV head and head dimension. Of `prompts` one session each, which take `steps` steps."""

    dtypes: tuple[str, ...]
    heads: tuple[tuple[int, int], ...]
    presets: tuple[str, ...]  # of decisions, and of steps
    shape: Shape
    prompts: tuple[int, ...]
    steps: int
    replays: int
    cycle: int  # steps behind one prompt, before it is begun anew
    delay_us: int  # of the daemon, at most
    wait_ms: int  # for a daemon that is dead
    margin_s: float  # until its error is there


SMALL: Shape = {
    **B8, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
LEAST: Shape = {
    **B8, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip

DEVICE = Scale(
    dtypes=DTYPES, heads=((1, 128), (2, 64), (4, 96), (5, 80), (4, 128), (8, 128), (16, 256)),
    presets=tuple(PRESETS.names), shape=SMALL, prompts=(1023, 300, 530), steps=12, replays=100_000, cycle=1000,
    delay_us=200, wait_ms=2000, margin_s=2.0,
)  # fmt: skip
REHEARSED = Scale(
    dtypes=("bfloat16",), heads=((2, 32),), presets=("qsac",), shape=LEAST, prompts=(258, 40), steps=3,
    replays=6, cycle=4, delay_us=2000, wait_ms=1000, margin_s=30.0,
)  # fmt: skip
