"""Accuracy of the retriever on whole documents: greedy answers, all three values right.

    python -m models.evaluate --context 8192 --facts 64 --documents 2

The document is prefilled once; all its questions are then answered on that prefix.  `--budget`
limits every layer but the first to the keys that an exact top-k would choose; several budgets
share the prefill.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import tokenizers
import torch
from torch import Tensor
from torch.nn import functional as F

from decode_worker.demo.document import Fact, load_words
from models import corpus
from models.network import Network, Shape, rotation

CHUNK = 1024
QUESTIONS_AT_ONCE = 32
ROOM = 8  # positions kept free behind the document for a question and its answer

Prefix = list[tuple[Tensor, Tensor]]  # by layer: K and V, [kv_heads, token, head_dim]


def load(model: Path) -> tuple[Network, tokenizers.Tokenizer]:
    """A saved model directory as network and tokenizer."""
    network = Network(Shape.of(json.loads((model / "config.json").read_text())))
    network.load_tensors(safetensors.torch.load_file(model / "model.safetensors"))
    return network, tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))


@torch.inference_mode()
def prefill(network: Network, ids: Tensor) -> Prefix:
    """K and V of a document; the last layer's attention has no reader and is left out."""
    shape, count = network.shape, len(ids)
    cos, sin = rotation(shape, torch.arange(count)[None, None])
    x, prefix = network.embed(ids[None]), []
    for layer in range(shape.num_hidden_layers):
        k, v = network.keys_values(layer, x, cos, sin)
        prefix.append((k[0], v[0]))
        if layer == shape.num_hidden_layers - 1:
            break
        k, v = (part.repeat_interleave(shape.group, 1) for part in (k, v))
        out = torch.empty_like(x)
        for start in range(0, count, CHUNK):
            end = min(start + CHUNK, count)
            rows = x[:, start:end]
            q = network.queries(layer, rows, cos[:, :, start:end], sin[:, :, start:end])
            seen = torch.ones(end - start, end, dtype=torch.bool).tril(start)
            attended = F.scaled_dot_product_attention(q, k[:, :, :end], v[:, :, :end], seen)
            out[:, start:end] = network.finish(layer, rows, attended)
        x = out
    return prefix


def within_budget(scores: Tensor, keys: int, pool: str) -> Tensor:
    """Keep the `keys` best of each KV head; scores [batch, kv_heads, group, token]."""
    ranked = scores.amax(2) if pool == "max" else scores.sum(2)
    chosen = torch.zeros_like(ranked, dtype=torch.bool)
    chosen.scatter_(-1, ranked.topk(keys, -1, sorted=False).indices, True)
    return scores.masked_fill(~chosen[:, :, None], -torch.inf)


@dataclass
class Decoder:
    """Token-by-token decoding of several sequences that share a prefix."""

    network: Network
    prefix: Prefix
    budget: float = 1.0  # share of the prefix that layers after the first may attend to
    pool: str = "max"
    tail: list[list[Tensor]] = field(init=False)  # by layer: own K and V, [batch, kv, token, dim]
    queries: list[Tensor] = field(init=False, default_factory=list)  # by step: [layer, batch, ...]

    def __post_init__(self) -> None:
        self.tail = [[] for _ in self.prefix]

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        """Feed one token to each sequence [batch]; returns the next tokens' logits."""
        shape, network = self.network.shape, self.network
        position = self.prefix[0][0].shape[1] + len(self.queries)
        cos, sin = rotation(shape, torch.tensor([[[position]]]))
        x, asked = network.embed(ids[:, None]), []
        for layer, (k_prefix, v_prefix) in enumerate(self.prefix):
            own = network.keys_values(layer, x, cos, sin)
            tail = self.tail[layer]
            tail[:] = [torch.cat(pair, 2) for pair in zip(tail, own, strict=True)] if tail else own
            q = network.queries(layer, x, cos, sin)[:, :, 0].unflatten(1, (-1, shape.group))
            asked.append(q.flatten(1, 2))
            q = q * shape.head_dim**-0.5
            scores = torch.einsum("bhgd,hnd->bhgn", q, k_prefix)
            if layer and self.budget < 1:
                keys = max(1, round(self.budget * scores.shape[-1]))
                scores = within_budget(scores, keys, self.pool)
            recent = torch.einsum("bhgd,bhnd->bhgn", q, tail[0])
            weights = torch.cat((scores, recent), -1).softmax(-1)
            count = k_prefix.shape[1]
            attended = torch.einsum("bhgn,hnd->bhgd", weights[..., :count], v_prefix)
            attended += torch.einsum("bhgn,bhnd->bhgd", weights[..., count:], tail[1])
            x = network.finish(layer, x, attended.flatten(1, 2)[:, :, None])
        self.queries.append(torch.stack(asked))
        return network.logits(x[:, 0])

    def similarity(self) -> Tensor:
        """Cosine of each step's query to the one before: [layer, query head, step - 1]."""
        steps = torch.stack(self.queries)  # [step, layer, batch, head, dim]
        return F.cosine_similarity(steps[1:], steps[:-1], dim=-1).mean(2).permute(1, 2, 0)


def answers(decoder: Decoder, questions: Tensor) -> Tensor:
    """Greedy values [question, 3] to questions [question, 2] of key and colon."""
    decoder.step(questions[:, 0])
    token, found = questions[:, 1], []
    for _ in range(3):
        token = decoder.step(token).argmax(-1)
        found.append(token)
    return torch.stack(found, 1)


@dataclass(frozen=True)
class Accuracy:
    right: int
    asked: int
    similarity: Tensor  # [layer, query head, step pair], mean over the questions


def ask(
    network: Network,
    tokenizer: tokenizers.Tokenizer,
    prefix: Prefix,
    facts: list[Fact],
    budget: float = 1.0,
    pool: str = "max",
) -> Accuracy:
    """Ask for every fact of a prefilled document."""
    asked = torch.tensor([tokenizer.encode(fact.question).ids for fact in facts])
    truth = torch.tensor([tokenizer.encode(fact.answer).ids for fact in facts])
    right, similarity = 0, torch.zeros(())
    for part in torch.arange(len(asked)).split(QUESTIONS_AT_ONCE):
        decoder = Decoder(network, prefix, budget, pool)
        right += int((answers(decoder, asked[part]) == truth[part]).all(-1).sum())
        similarity = similarity + decoder.similarity() * (len(part) / len(asked))
    return Accuracy(right, len(asked), similarity)


def report(args: argparse.Namespace, budget: float, parts: list[Accuracy]) -> dict[str, Any]:
    """One budget's result over all documents."""
    right, asked = sum(part.right for part in parts), sum(part.asked for part in parts)
    cosines = torch.stack([part.similarity for part in parts]).mean((0, -1))
    return {
        "context": args.context,
        "split": args.split,
        "documents": args.documents,
        "budget": budget,
        "pool": args.pool,
        "right": right,
        "asked": asked,
        "accuracy": right / asked,
        "adjacent_query_cosine": [[round(c, 3) for c in layer] for layer in cosines.tolist()],
    }


def show(result: dict[str, Any]) -> None:
    keys = "all keys" if result["budget"] == 1 else f"{result['budget']:.2%} of the keys"
    print(
        f"{result['context']} tokens, {result['split']}, {keys}:"
        f" {result['right']}/{result['asked']} = {result['accuracy']:.1%}"
    )
    for layer, row in enumerate(result["adjacent_query_cosine"]):
        heads = "  ".join(f"{cosine:6.3f}" for cosine in row)
        print(f"  layer {layer}: cosine of adjacent queries by head  {heads}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=corpus.RETRIEVER)
    parser.add_argument("--context", type=int, default=8192, help="tokens with the question")
    parser.add_argument("--facts", type=int, default=64)
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--split", choices=("eval", "demo"), default="eval")
    parser.add_argument("--seed", type=int, default=0, help="of the first document")
    parser.add_argument("--budget", type=float, nargs="+", default=[1.0], help="shares of the keys")
    parser.add_argument("--pool", choices=("max", "sum"), default="max", help="over a query group")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    for budget in args.budget:
        if not 0 < budget <= 1:
            parser.error(f"--budget {budget} is not a share: give more than 0, at most 1")
    torch.set_num_threads(args.threads)
    network, tokenizer = load(args.model)
    words = load_words(args.model)
    parts: dict[float, list[Accuracy]] = {budget: [] for budget in args.budget}
    for seed in range(args.seed, args.seed + args.documents):
        tokens = args.context - ROOM
        document = corpus.make_document(words, tokens, args.facts, seed, args.split)
        prefix = prefill(network, torch.tensor(tokenizer.encode(document.text).ids))
        for budget, results in parts.items():
            results.append(ask(network, tokenizer, prefix, document.facts, budget, args.pool))
    for budget, results in parts.items():
        row = report(args, budget, results)
        print(json.dumps(row)) if args.json else show(row)


if __name__ == "__main__":
    main()
