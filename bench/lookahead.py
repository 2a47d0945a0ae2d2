"""What is it worth to tell the daemon ahead what misses will want? Steps on drifting queries, a part of the KV in DRAM.

A random model whose embeddings turn slowly from one token to the next is fed one token after the other, so that heads
leave their labels step by step. Cases (`--cases`: off, next, numbers of steps) take turns in rounds over one document:

    step_ms.CASE      of a step; the rival is `off` in the same round
    arrive_ms.CASE    of a step, that it waited for tickets
    read_bytes.CASE   of a step from the disk
    late_bytes.CASE   of these, for tickets
    useful.CASE       late bytes that were saved (against `off`) per byte read ahead; 0: none were
    hinted.CASE       records that a step hinted

Each once with `--dram` of the KV in DRAM and once (`in_dram`) with all of it, where hints can only cost.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from bench.decoder import SEED, Decoder, Document, Sample
from bench.document import counters, scratch
from bench.parts import count
from decode_worker.figures import Figure, print_json, print_table
from decode_worker.policy.lookahead import Lookahead
from decode_worker.synthetic.checkpoint import B8, Shape, random_checkpoint

OFF = "off"


@dataclass(frozen=True)
class Settings:
    """`turn`: degrees between the embeddings of neighbouring tokens. `eta`: every head's threshold."""

    cases: tuple[str, ...] = (OFF, "next", "1", "4")
    dram: float = 0.25
    shape: Shape = field(default_factory=lambda: B8)
    tokens: int = 32 << 10
    budget: float = 0.05
    turn: float = 6.0
    eta: float = 0.8
    steps: int = 12
    rounds: int = 8
    threads: int = 1


def main() -> int:
    default = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m bench.lookahead", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default=",".join(default.cases), help="off comes first, as the rival of all")
    parser.add_argument("--dram", type=float, default=default.dram, help="part of the KV")
    parser.add_argument("--tokens", type=count, default=default.tokens)
    parser.add_argument("--turn", type=float, default=default.turn, help="degrees")
    parser.add_argument("--steps", type=count, default=default.steps, help="of a round")
    parser.add_argument("--rounds", type=count, default=default.rounds)
    parser.add_argument("--json", action="store_true")
    a = parser.parse_args()
    cases = tuple(a.cases.split(","))
    try:
        if cases[0] != OFF or len(cases) < 2:
            raise ValueError("off must come first, and something behind it")
        for case in cases:
            Lookahead.of(case)
    except ValueError as error:
        parser.error(f"--cases {a.cases}: {error}")
    figures = measure(Settings(cases, a.dram, tokens=a.tokens, turn=a.turn, steps=a.steps, rounds=a.rounds))
    print_json(figures) if a.json else print_table("Looking ahead of misses", figures)
    return 0


def measure(settings: Settings) -> list[Figure]:
    figures = []
    with scratch() as name:
        checkpoint = drifting_checkpoint(Path(name) / "model", settings.shape, settings.turn)
        for part, dram in (("", settings.dram), ("in_dram.", 1.0)):
            samples = _rounds(settings, checkpoint, Path(name), dram)
            figures += [figure for case in settings.cases for figure in _figures(part, case, samples)]
    return figures


def drifting_checkpoint(directory: Path, shape: Shape, turn: float) -> Path:
    """A random checkpoint with each token's embedding `turn` degrees from that of the one before."""
    random_checkpoint(directory, shape, SEED)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    walk = tensors["model.embed_tokens.weight"].float()
    for token in range(1, len(walk)):
        walk[token] = math.cos(math.radians(turn)) * walk[token - 1] + math.sin(math.radians(turn)) * walk[token]
    tensors["model.embed_tokens.weight"] = walk.to(torch.bfloat16)
    save_file(tensors, file, {"format": "pt"})
    return directory


def _rounds(settings: Settings, checkpoint: Path, directory: Path, dram: float) -> dict[str, list[Sample]]:
    samples: dict[str, list[Sample]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        document = stack.enter_context(
            Document(
                checkpoint, directory, settings.tokens, dram_share=dram, budget=settings.budget, eta=settings.eta,
                layer0="offloaded", threads=settings.threads,
            )
        )  # fmt: skip
        decoders = {case: document.decoder("qsac", lookahead=case) for case in settings.cases}
        for decoder in decoders.values():
            decoder.walks = True
        for number in range(settings.rounds + 1):  # the first one warms
            turn = number % len(settings.cases)
            for case in (*settings.cases[turn:], *settings.cases[:turn]):
                sample = _sample(decoders[case], settings.steps)
                if number:
                    samples[case].append(sample)
    return samples


def _sample(decoder: Decoder, steps: int) -> Sample:
    daemon, policy = decoder.document.daemon, decoder.engine.policy
    warm, hinted = counters(daemon)["warm_bytes"], policy.counters.hinted
    sample = decoder.run(steps)
    ahead = (counters(daemon)["warm_bytes"] - warm) / steps
    hinted = (policy.counters.hinted - hinted) / steps
    return sample | {"ahead": ahead, "late": sample["nvme_read"] - ahead, "hinted": hinted}


def _figures(part: str, case: str, samples: dict[str, list[Sample]]) -> list[Figure]:
    mine, off = samples[case], samples[OFF]

    def column(of: Sequence[Sample], name: str) -> list[float]:
        return [sample[name] for sample in of]

    def mean(of: Sequence[Sample], name: str) -> float:
        return statistics.mean(column(of, name))

    ratios = [a / b for a, b in zip(column(mine, "step"), column(off, "step"), strict=True)]
    figures = [
        Figure(
            f"{part}step_ms.{case}", statistics.median(column(mine, "step")), "ms", OFF,
            statistics.median(column(off, "step")), statistics.median(ratios), len(mine), min(ratios), max(ratios),
        ),
        Figure(f"{part}arrive_ms.{case}", mean(mine, "phase.arrive"), "ms"),
        Figure(f"{part}hit_ratio.{case}", mean(mine, "hit_ratio"), "of the look-ups"),
        Figure(f"{part}read_bytes.{case}", mean(mine, "nvme_read"), "B"),
        Figure(f"{part}late_bytes.{case}", mean(mine, "late"), "B"),
    ]  # fmt: skip
    if case == OFF:
        return figures
    ahead, saved = mean(mine, "ahead"), mean(off, "late") - mean(mine, "late")
    return [
        *figures,
        Figure(f"{part}hinted.{case}", mean(mine, "hinted"), "records"),
        Figure(f"{part}useful.{case}", max(0.0, saved / ahead) if ahead else 0.0, "B/B"),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
