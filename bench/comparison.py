"""Our step and every rival's behind the same document, in turn, and the figures that come of it."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from bench.decoder import HITS, WARM_STEPS, Decoder, Document, Sample
from bench.rivals import RIVALS, NotRun, Problem
from decode_worker.figures import Figure

OURS = "qsac"
USUAL = "hit75"  # of figures that have one value for all hits
STREAM = "stream"
PYTHON_STEPS = 10
PRODUCTS = "products"  # the phase of a step that is neither attention nor selection

Run = Callable[[int], Sample]  # a number of steps -> means over them
Samples = Mapping[str, Sequence[Sample]]


@dataclass(frozen=True)
class Preset:
    """A policy of our own engine as a rival. `steered`: how long it takes depends on how many heads hit."""

    policy: str
    steered: bool


PRESETS = {
    "full": Preset("full", steered=False),
    "infinigen": Preset("infinigen", steered=False),
    "litecache": Preset("litecache", steered=True),
    "lru": Preset("lru", steered=False),
}


def in_turn(runs: Mapping[str, Run], steps: int, repeats: int) -> Samples:
    """`repeats` samples of each, so that a slow minute of the machine counts for all, and in another order each time:
    none always comes behind the same one, whose threads may still spin."""
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    for turn in range(repeats):
        for name in random.Random(turn).sample(list(runs), len(runs)):
            samples[name].append(runs[name](steps))
    return samples


@dataclass
class Comparison:
    """What runs behind one document. Names: of ours the hits (`hit75`), else the rival (`full`, `litecache.hit75`)."""

    document: Document
    stream_bytes: int
    runs: dict[str, Run] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)  # rival -> why it was not run
    decoders: dict[str, Decoder] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for hits in HITS:
            self._add_decoder(hits, OURS, hits)
        for rival, preset in PRESETS.items():
            with self._noting(rival):
                for hits in HITS if preset.steered else (USUAL,):
                    self._add_decoder(name_of(rival, hits), preset.policy, hits)
        for rival in RIVALS:
            with self._noting(rival):
                self.runs[rival] = self._rival(rival)
        self.runs[STREAM] = stream_run(self.stream_bytes)

    def _add_decoder(self, name: str, policy: str, hits: str) -> None:
        self.decoders[name] = decoder = self.document.decoder(policy, HITS[hits])
        self.runs[name] = decoder.run

    def _rival(self, rival: str) -> Run:
        document = self.document
        assert document.model is not None
        step = RIVALS[rival](Problem(document.checkpoint, document.model, document.tokens, document.threads))

        def run(steps: int) -> Sample:
            started = time.perf_counter()
            for _ in range(steps):
                step()
            return {"step": 1000 * (time.perf_counter() - started) / steps}

        run(WARM_STEPS)
        return run

    @contextlib.contextmanager
    def _noting(self, rival: str) -> Iterator[None]:
        try:
            yield
        except NotRun as error:
            self.missing[rival] = str(error)

    # --- figures; `kind` ends the first word of each name, `at` is the context's label ---

    def figures(self, samples: Samples, at: str, kind: str = "") -> list[Figure]:
        return [
            *self._speedups(samples, at, kind),
            *self._steps(samples, at, kind),
            *self._parts(samples, at, kind),
        ]

    def _speedups(self, samples: Samples, at: str, kind: str) -> Iterator[Figure]:
        for hits in HITS:
            for rival in (*RIVALS, *PRESETS):
                name = f"speedup{kind}.{at}.{hits}.{rival}"
                if rival in self.missing:
                    yield Figure.not_run(name, self.missing[rival])
                else:
                    yield Figure.of_runs(name, ratios(samples[name_of(rival, hits)], samples[hits]), "x")

    def _steps(self, samples: Samples, at: str, kind: str) -> Iterator[Figure]:
        for name in self.runs:
            if name != STREAM:
                yield Figure.of_runs(f"step_ms{kind}.{at}.{name}", column(samples[name], "step"), "ms")
        for name, decoder in self.decoders.items():
            yield Figure(f"device_bytes{kind}.{at}.{name}", decoder.device_bytes, "B")
        for hits in HITS:
            yield from details(samples[hits], f"{at}.{hits}", kind)

    def _parts(self, samples: Samples, at: str, kind: str) -> Iterator[Figure]:
        """What a step is made of, at the usual hits; and how near `full` comes to a stream read."""
        steps = samples[USUAL]
        elsewhere = [phase for phase in phases(steps[0]) if phase != f"phase.{PRODUCTS}"]
        outside = [sample["step"] - sum(sample[phase] for phase in elsewhere) for sample in steps]
        yield Figure.of_runs(f"outside_ms{kind}.{at}", outside, "ms")
        python = [self.decoders[USUAL].python_ms(PYTHON_STEPS) for _ in steps]
        yield Figure.of_runs(f"python_ms{kind}.{at}", python, "ms")
        read = [self.document.kv_bytes / (sample["phase.attend"] / 1000) / 1e9 for sample in samples["full"]]
        rate = column(samples[STREAM], "gb_per_s")
        share = [a / b for a, b in zip(read, rate, strict=True)]
        yield Figure.of_runs(f"full_read_share{kind}.{at}", share, "of a stream read")
        yield Figure.of_runs(f"full_read{kind}.{at}", read, "GB/s", "stream read", rate)


def details(samples: Sequence[Sample], at: str, kind: str = "") -> Iterator[Figure]:
    """What one of our decoders did, and when; `at` ends each name."""
    yield Figure.of_runs(f"hit_ratio{kind}.{at}", column(samples, "hit_ratio"), "hits / lookups")
    yield Figure.of_runs(f"moved{kind}.{at}", column(samples, "moved"), "records/step")
    yield Figure.of_runs(f"nvme_read{kind}.{at}", column(samples, "nvme_read"), "B/step")
    for phase in phases(samples[0]):
        name = f"phase_ms{kind}.{at}.{phase.removeprefix('phase.')}"
        yield Figure.of_runs(name, column(samples, phase), "ms")


def name_of(rival: str, hits: str) -> str:
    return f"{rival}.{hits}" if rival in PRESETS and PRESETS[rival].steered else rival


def column(samples: Sequence[Sample], key: str) -> list[float]:
    return [sample[key] for sample in samples]


def ratios(rivals: Sequence[Sample], ours: Sequence[Sample]) -> list[float]:
    """How many of our steps a rival's step takes, run by run."""
    return [a["step"] / b["step"] for a, b in zip(rivals, ours, strict=True)]


def phases(sample: Sample) -> list[str]:
    return [key for key in sample if key.startswith("phase.")]


def stream_run(nbytes: int) -> Run:
    """The rate at which torch's threads read memory."""
    buffer = torch.ones(nbytes // 4)

    def run(_: int) -> Sample:
        started = time.perf_counter()
        buffer.sum()
        return {"gb_per_s": buffer.nbytes / (time.perf_counter() - started) / 1e9}

    return run
