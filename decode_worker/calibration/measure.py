"""Measures a checkpoint for its profile: importance of heads, similarity of queries, eta and p; judges the hash.

LiteCache §4.2-4.4 with DuoAttention's importance by ablation: all questions about a document are fed at once, answers
included (teacher forced), over the document's KV. A greedy answer is right exactly where all forced ones are likeliest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from decode_worker import _native
from decode_worker.calibration.profile import HASH_BITS, Profile
from decode_worker.model.attention import causal_attention
from decode_worker.model.transformer import Transformer

CHUNK = 1024
LAYER0 = 0  # resident by default: never simulated, never measured for recall
FEW_QUESTIONS = 16  # of each document: importance needs two passes per query head
ACCURACY_LOSS = 0.005  # what eta and p may cost
ETAS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
POWERS = (3.0, 2.0, 1.0, 0.5, 0.2, 0.1, 0.0)
# Few questions cannot tell a head of no importance from one of a hundredth.
IMPORTANCE_FLOOR = 0.01
HITS_WANTED = 0.5

Table = NDArray[np.float32]
Visible = Callable[[int, Tensor], Tensor | None]


@dataclass(frozen=True)
class Limits:
    """The constants of docs/qsac.md that a measurement depends on."""

    budget: float = 0.1
    sink: int = 4
    recent: int = 64
    cos_floor: float = 1e-3
    storage: torch.dtype = torch.bfloat16


@dataclass(frozen=True, eq=False)
class Questions:
    """`ids`, `targets` int64[B, T]: tokens fed, and what follows each; `fed`, `answer` bool[B, T]: which count."""

    ids: Tensor
    targets: Tensor
    fed: Tensor
    answer: Tensor

    @staticmethod
    def of(pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Questions:
        """From (question, answer) as token ids; shorter ones are padded behind their end."""
        width = max(len(question) + len(answer) for question, answer in pairs)
        rows = torch.zeros(len(pairs), width, dtype=torch.int64)
        fed, asked = torch.zeros(2, len(pairs), width - 1, dtype=torch.bool)
        for row, (question, answer) in enumerate(pairs):
            end = len(question) + len(answer)
            rows[row, :end] = torch.tensor([*question, *answer])
            fed[row, : end - 1] = True
            asked[row, len(question) - 1 : end - 1] = True
        return Questions(rows[:, :-1], rows[:, 1:], fed, asked)

    def spread(self, count: int) -> Questions:
        """`count` questions at most, spread over all of them (and so over the document)."""
        rows = slice(None, None, -(-len(self.ids) // count))
        return Questions(self.ids[rows], self.targets[rows], self.fed[rows], self.answer[rows])


@dataclass(frozen=True, eq=False)
class Case:
    """A stored document and its questions; `prefix`: by layer K and V, float32[H, N, d] as stored."""

    prefix: Sequence[tuple[Tensor, Tensor]]
    questions: Questions

    @property
    def stored(self) -> int:
        return self.prefix[0][0].shape[1]


class Score(NamedTuple):
    """Mean loss of the answer tokens, and the share of answers that are right in all of them."""

    loss: float
    accuracy: float


@torch.inference_mode()
def prefill(model: Transformer, ids: Sequence[int], storage: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """K and V of a document by layer, [H, N, d], rounded as stored and as attention sees them."""
    positions, x = torch.arange(len(ids)), model.embed(torch.tensor(ids))
    prefix = []
    for layer in range(model.config.layers):
        _, k, v = model.qkv(layer, x, positions)
        k, v = (each.to(storage).to(each.dtype) for each in (k, v))
        prefix.append((_stored(k, storage), _stored(v, storage)))
        if layer == model.config.layers - 1:
            break  # the output of the last layer has no reader
        for part in positions.split(CHUNK):
            first, end = int(part[0]), int(part[-1]) + 1
            q = model.query(layer, x[first:end], part)
            model.finish(layer, x[first:end], causal_attention(q, k[:end], v[:end], first, model.scale))
    return prefix


def _stored(x: Tensor, storage: torch.dtype) -> Tensor:
    return x.transpose(0, 1).to(storage).float().contiguous()


@torch.inference_mode()
def ask(model: Transformer, case: Case, visible: Visible) -> Score:
    """Feeds all questions. `visible(layer, q~)`: which of the stored tokens each query sees, see `attend`; None: all.

    q~ [B, T, Hq, d] is the speculative query, from the input of the layer before (layer 0: its true query).
    """
    questions, config = case.questions, model.config
    shape = questions.ids.shape
    positions = torch.arange(case.stored, case.stored + shape[1]).repeat(shape[0])
    x = before = model.embed(questions.ids.flatten())
    for layer, prefix in enumerate(case.prefix):
        guess = model.query(layer, before, positions).view(*shape, config.q_heads, config.head_dim)
        q, k, v = (part.reshape(*shape, -1, config.head_dim) for part in model.qkv(layer, x, positions))
        attended = attend(q, k, v, prefix, visible(layer, guess), model.scale)
        before, x = x, model.finish(layer, x.clone(), attended.flatten(0, 1))
    logits, targets = model.logits(x.view(*shape, -1)[questions.answer]), questions.targets[questions.answer]
    right = torch.ones(shape, dtype=torch.bool)
    right[questions.answer] = logits.argmax(-1) == targets
    return Score(float(F.cross_entropy(logits, targets)), float(right.all(1).float().mean()))


def attend(
    q: Tensor, k: Tensor, v: Tensor, prefix: tuple[Tensor, Tensor], visible: Tensor | None, scale: float
) -> Tensor:
    """Attention of q [B, T, Hq, d] over the stored K, V [H, N, d] and causally over the own k, v [B, T, H, d].

    visible: bool, of a shape that broadcasts to [B, H, g, T, N]. The result has q's shape.
    """
    past_k, past_v = prefix
    heads, steps, stored = k.shape[2], q.shape[1], past_k.shape[1]
    grouped = q.unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4)
    past = torch.einsum("bhgtd,hnd->bhgtn", grouped, past_k)
    if visible is not None:
        past.masked_fill_(~visible, -math.inf)
    own = torch.einsum("bhgtd,bshd->bhgts", grouped, k)
    own.masked_fill_(torch.ones(steps, steps, dtype=torch.bool).triu(1), -math.inf)
    weights = torch.cat([past, own], -1).mul_(scale).softmax(-1)
    out = torch.einsum("bhgtn,hnd->bthgd", weights[..., :stored], past_v)
    out += torch.einsum("bhgts,bshd->bthgd", weights[..., stored:], v)
    return out.flatten(2, 3)


def everything(layer: int, query: Tensor) -> Tensor | None:
    """Full attention."""
    return None


# --- importance (§4.2, Appendix B) ---


def near(stored: int, steps: int, limits: Limits) -> Tensor:
    """bool[T, N]: the sinks and the recent tokens of each step."""
    token, position = torch.arange(stored), torch.arange(stored, stored + steps)[:, None]
    return (token < limits.sink) | (token >= position - limits.recent)


def ablate(case: Case, heads: Tensor, limits: Limits) -> Visible:
    """The query heads `heads` (bool[layers, H, g]) see sinks and recent tokens only, all others everything."""
    seen = near(case.stored, case.questions.ids.shape[1], limits)
    return lambda layer, query: (seen | ~heads[layer, ..., None, None])[None] if heads[layer].any() else None


def importance(model: Transformer, cases: Sequence[Case], limits: Limits) -> tuple[Table, Table]:
    """KV heads [layers, H] and query heads [layers, Hq]: the rise of the loss when a head is ablated, the largest is 1.

    Heads that replace each other hide from single ablations, so all are ablated one after the other, in a random order
    and in its reverse, a KV head's query heads together: the Owen value, whose sum over a KV head is its own.
    """
    config, rng = model.config, np.random.default_rng(0)
    grid = (config.layers, config.kv_heads, config.q_heads // config.kv_heads)
    rises = np.zeros(grid)
    for whole in cases:
        case = replace(whole, questions=whole.questions.spread(FEW_QUESTIONS))
        order = ablation_order(rng, *grid)
        for sequence in (order, order[::-1]):
            heads = torch.zeros(grid, dtype=torch.bool)
            last = ask(model, case, everything).loss
            for head in sequence:
                heads[head] = True
                loss = ask(model, case, ablate(case, heads, limits)).loss
                rises[head] += loss - last
                last = loss
    return relative(rises.sum(2)), relative(rises.reshape(config.layers, config.q_heads))


def ablation_order(rng: np.random.Generator, layers: int, kv_heads: int, group: int) -> list[tuple[int, int, int]]:
    """All query heads as (layer, KV head, place in its group): groups stay together, both levels are shuffled."""
    groups = rng.permutation([(layer, head) for layer in range(layers) for head in range(kv_heads)])
    return [(int(layer), int(head), int(member)) for layer, head in groups for member in rng.permutation(group)]


def relative(rises: NDArray[np.float64]) -> Table:
    """Scaled to [floor, 1]; 1 everywhere (cautious) where no ablation raises the loss."""
    if rises.max() <= 0:
        return np.ones(rises.shape, np.float32)
    return (rises / rises.max()).clip(IMPORTANCE_FLOOR, 1).astype(np.float32)


# --- similarity (eq. 2) and the simulation of QSAC ---


def similarity(query: Tensor, label: Tensor, weights: Table, cos_floor: float) -> Tensor:
    """Eq. 2 as docs/qsac.md step 3: query and label [B, Hq, d], weights [H, g] -> [B, H]; NaN where a norm is zero."""
    new, old = (np.ascontiguousarray(x.reshape(len(x), *weights.shape, -1).numpy()) for x in (query, label))
    return torch.from_numpy(_native.similarity(new, old, weights, cos_floor))


def mean_similarity(model: Transformer, cases: Iterable[Case], profile: Profile, limits: Limits) -> Table:
    """Of adjacent steps' speculative queries, [layers, H] (§4.4)."""
    found: list[list[Tensor]] = [[] for _ in range(model.config.layers)]
    weights = profile.query_weights()
    for case in cases:
        pairs = case.questions.fed[:, 1:]
        for layer, query in enumerate(speculative_queries(model, case)):
            found[layer].append(similarity(query[:, 1:][pairs], query[:, :-1][pairs], weights[layer], limits.cos_floor))
    means = torch.stack([torch.cat(parts).nanmean(0) for parts in found]).numpy()
    return means.clip(-1, 1).astype(np.float32)


def speculative_queries(model: Transformer, case: Case) -> list[Tensor]:
    """q~ of every layer under full attention, [B, T, Hq, d]."""
    queries: list[Tensor] = []
    ask(model, case, lambda layer, query: queries.append(query))
    return queries


@dataclass
class Simulation:
    """Policy qsac with retriever hash over one case: docs/qsac.md, steps 3-6, for sessions without a first set.

    Layer 0 is resident. No question is long enough to fill a tail, so no miss is forced and nothing is sealed.
    `lookups` and `hits` leave out a session's first step, which has no label, as the policy's counters do.
    """

    case: Case
    profile: Profile
    limits: Limits
    lookups: int = 0
    hits: int = 0
    tau: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.tau = torch.from_numpy(self.profile.thresholds())

    def __call__(self, layer: int, query: Tensor) -> Tensor | None:
        """bool[B, H, 1, T, N]; see `ask`."""
        if layer == LAYER0:
            return None
        case, limits, weights = self.case, self.limits, self.profile.query_weights()[layer]
        distance = hash_distance(self.profile, layer, query, case.prefix[layer][0])
        token = torch.arange(case.stored)
        label, chosen = torch.zeros_like(query[:, 0]), torch.zeros_like(distance[:, 0], dtype=torch.bool)
        cover, seen = torch.zeros(chosen.shape[:2], dtype=torch.int64), []
        for step in range(query.shape[1]):
            hit = similarity(query[:, step], label, weights, limits.cos_floor) > self.tau[layer]
            limit = selectable(case.stored, case.stored + step, limits)
            fresh = nearest(distance[:, step], limit, limits)
            chosen = torch.where(hit[..., None], chosen, fresh)
            cover = cover.where(hit, torch.tensor(limit))
            label = label.where(hit.repeat_interleave(weights.shape[1], 1)[..., None], query[:, step])
            seen.append(chosen | (token < limits.sink) | (token >= cover[..., None]))
            counted = hit[case.questions.fed[:, step] & (step > 0)]
            self.lookups, self.hits = self.lookups + counted.numel(), self.hits + int(counted.sum())
        return torch.stack(seen, 2)[:, :, None]


def selectable(stored: int, position: int, limits: Limits) -> int:
    """S of docs/qsac.md: tokens below it may be selected."""
    return max(min(limits.sink, stored), min(stored, position - limits.recent))


class Point(NamedTuple):
    """One row of the sweep."""

    eta: float
    p: float
    accuracy: float
    hit_ratio: float


def simulate(model: Transformer, cases: Iterable[Case], profile: Profile, limits: Limits) -> Point:
    """Accuracy and label hits of QSAC with this profile."""
    simulations = [Simulation(case, profile, limits) for case in cases]
    accuracy = accuracy_of(ask(model, s.case, s) for s in simulations)
    lookups = sum(s.lookups for s in simulations)
    return Point(profile.eta, profile.p, accuracy, sum(s.hits for s in simulations) / max(1, lookups))


def accuracy_of(scores: Iterable[Score]) -> float:
    return float(np.mean([score.accuracy for score in scores]))


def sweep(model: Transformer, cases: Sequence[Case], profile: Profile, enough: float, limits: Limits) -> list[Point]:
    """Eta from cautious to bold down to the first that is not accurate `enough` (§4.3).

    p starts at the paper's value and falls: the smaller p, the more heads ever miss.
    """
    points: list[Point] = []
    for p in POWERS:
        for eta in ETAS:
            points.append(simulate(model, cases, replace(profile, eta=eta, p=p), limits))
            if points[-1].accuracy < enough:
                break
    return points


def choose(points: Iterable[Point], enough: float) -> Point:
    """The most cautious accurate point at which most lookups still hit, else the accurate one with most hits.

    Accuracies within the questions' resolution are alike, so caution is worth more than the last hits. If no point is
    accurate enough, the most accurate one.
    """
    points = list(points)
    good = [point for point in points if point.accuracy >= enough and point.hit_ratio >= HITS_WANTED]
    if good:
        return min(good, key=lambda point: (point.p, -point.eta))
    return max(points, key=lambda point: (min(point.accuracy, enough), point.hit_ratio))


# --- the hash (HATA) ---


def signs(x: Tensor, projection: Tensor) -> Tensor:
    """Codes of x [..., H, n, d] under projections [H, d, 256] as -1 and 1."""
    return torch.where(x @ projection > 0, 1.0, -1.0)


def hash_distance(profile: Profile, layer: int, query: Tensor, keys: Tensor) -> Tensor:
    """Hamming distances summed over the query group: query [B, T, Hq, d], keys [H, N, d] -> int32[B, T, H, N]."""
    heads, _, d = keys.shape
    layers = profile.kv_importance.shape[0]
    projection, centre = (torch.from_numpy(x[layer]) for x in profile.hash_parameters(layers, heads, d))
    group = query.shape[2] // heads
    asked = signs(query.unflatten(2, (heads, group)), projection).sum(3)
    agreement = torch.einsum("bthj,hnj->bthn", asked, signs(keys - centre[:, None], projection))
    return ((group * HASH_BITS - agreement) / 2).int()


def nearest(distance: Tensor, limit: int, limits: Limits) -> Tensor:
    """The selection of docs/qsac.md step 5: distance int32[..., N] -> bool[..., N], ties to the lower token."""
    stored = distance.shape[-1]
    k = min(max(1, math.ceil(limits.budget * stored)), limit - limits.sink)
    chosen = torch.zeros_like(distance, dtype=torch.bool)
    if k <= 0:
        return chosen
    order = distance.long() * stored + torch.arange(stored)
    best = order[..., limits.sink : limit].topk(k, -1, largest=False, sorted=False).indices
    return chosen.scatter_(-1, best + limits.sink, True)


def hash_variants(profile: Profile, cases: Sequence[Case]) -> dict[str, Profile]:
    """The documented random hash; the same with centred keys; and with columns that are orthogonal in blocks of d."""
    mean = [
        torch.stack([case.prefix[layer][0].mean(1) for case in cases]).mean(0) for layer in range(len(cases[0].prefix))
    ]
    projection, _ = profile.hash_parameters(len(mean), *mean[0].shape)
    blocks = torch.from_numpy(projection).split(mean[0].shape[1], -1)
    return {
        "random": profile,
        "centred": replace(profile, centre=torch.stack(mean).numpy()),
        "orthogonal": replace(
            profile, projection=torch.cat([torch.linalg.qr(block)[0] for block in blocks], -1).numpy()
        ),
    }


def attention_kept(model: Transformer, cases: Iterable[Case], profile: Profile, limits: Limits) -> Table:
    """Attention mass in the hash's selection relative to the exact one, both by the speculative query: [layers, H]."""
    kept = []
    for whole in cases:
        case = replace(whole, questions=whole.questions.spread(FEW_QUESTIONS))
        limit = selectable(case.stored, case.stored, limits)
        ratios = []
        for layer, query in enumerate(speculative_queries(model, case)):
            keys = case.prefix[layer][0]
            scores = torch.einsum("bthgd,hnd->bthgn", query.unflatten(2, (len(keys), -1)), keys) * model.scale
            mass = scores[..., limits.sink : limit].softmax(-1).sum(3)
            chosen = nearest(hash_distance(profile, layer, query, keys), limit, limits)[..., limits.sink : limit]
            best = mass.topk(int(chosen[0, 0, 0].sum()), -1, sorted=False).values
            ratios.append(((mass * chosen).sum(-1) / best.sum(-1))[case.questions.fed].mean(0))
        kept.append(torch.stack(ratios))
    return torch.stack(kept).mean(0).numpy()


# --- the profile ---


def measure_profile(model: Transformer, cases: Sequence[Case], limits: Limits) -> tuple[Profile, list[Point], float]:
    """The profile without a trained hash, the sweep that chose its eta and p, and the accuracy of full attention."""
    full = accuracy_of(ask(model, case, everything) for case in cases)
    kv, query = importance(model, cases, limits)
    profile = replace(Profile.default(model.config), kv_importance=kv, query_importance=query)
    profile = replace(profile, mean_similarity=mean_similarity(model, cases, profile, limits))
    points = sweep(model, cases, profile, full - ACCURACY_LOSS, limits)
    best = choose(points, full - ACCURACY_LOSS)
    return replace(profile, eta=best.eta, p=best.p), points, full


def save(profile: Profile, path: Path) -> None:
    """The file that Profile.load reads; tables are rounded to four places."""
    tables = ("query_importance", "kv_importance", "mean_similarity")
    content = {name: np.round(getattr(profile, name).astype(float), 4).tolist() for name in tables}
    numbers = {"eta": profile.eta, "p": profile.p, "margin": profile.margin}
    path.write_text(json.dumps(content | numbers, indent=1) + "\n")
