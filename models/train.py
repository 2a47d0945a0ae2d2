"""Train the retriever on the CPU: structured start, then a curriculum on length and positions.

    python -m models.train --minutes 60 --work /tmp/retriever

Continues from the checkpoint in `--work` if there is one, and exports to `--model` as it goes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import tokenizers
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from decode_worker.demo.document import FACT_TOKENS, WORD, words_of
from models import corpus
from models.network import Network, Shape, frequencies, rotation

ANSWER_TOKENS = 4  # three values and the full stop, which ends the generation
SHARP_DIMS = 8
VOCABULARY = 4096
SPECIALS = ("[UNK]", "[PAD]")


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum; positions are spread over `span`, 0 for no gaps."""

    tokens: int
    facts: int
    questions: int
    batch: int
    span: int = 0
    crowd: int = 1  # each filler token counts as up to this many, as in a longer text


CURRICULUM = (
    Stage(64, 4, 4, 96),
    Stage(128, 8, 8, 48),
    Stage(128, 8, 8, 48, span=4096),
    Stage(256, 16, 12, 24, span=16384),
    Stage(512, 32, 16, 12, span=65536, crowd=4),
    Stage(1024, 96, 32, 6, span=131072, crowd=16),
    Stage(2048, 128, 64, 3, span=131072, crowd=64),
)
# What follows the curriculum asks for every fact: what is left to learn are single keys and values.
REFINEMENT = (
    Stage(1024, 128, 128, 6, span=131072, crowd=64),
    Stage(2048, 160, 160, 3, span=131072, crowd=64),
    Stage(4096, 160, 160, 1, span=131072, crowd=32),
)
NOISE_MAX = 0.3  # share of a text's tokens that are replaced, at most
PASS_MARK = 0.93
AVERAGE = 0.99  # the export is a moving average over about a hundred steps


def build_tokenizer() -> tokenizers.Tokenizer:
    """Word-level over lower-case words, single digits and single signs, by frequency."""
    counts: Counter[str] = Counter()
    splits: tuple[corpus.Split, ...] = ("train", "demo")
    for split in splits:
        for text in corpus.texts(split):
            counts.update(words_of(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    # Every printable sign and digit is kept, so that ordinary text has few unknown tokens.
    signs = [chr(code) for code in range(33, 127) if not chr(code).isalpha()]
    ranked = [word for word in ranked if word not in signs]
    room = VOCABULARY - len(SPECIALS) - len(signs)
    words = [*SPECIALS, *signs, *ranked[:room]]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(WORD), behavior="removed", invert=True)
    return tokenizer


def export(model: Path, network: Network, tokenizer: tokenizers.Tokenizer) -> None:
    """Write a directory that transformers loads; each file is replaced in one rename."""
    shape, eos = network.shape, tokenizer.token_to_id(".")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": tokenizer.token_to_id("[PAD]"),
        "torch_dtype": "float32",
    }
    generation = {"do_sample": False, "eos_token_id": eos, "max_new_tokens": ANSWER_TOKENS}
    wrapper = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "model_max_length": shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    model.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": json.dumps(config, indent=2).encode() + b"\n",
        "generation_config.json": json.dumps(generation, indent=2).encode() + b"\n",
        "tokenizer.json": tokenizer.to_str(pretty=True).encode() + b"\n",
        "tokenizer_config.json": json.dumps(wrapper, indent=2).encode() + b"\n",
        "model.safetensors": safetensors.torch.save(network.tensors(), {"format": "pt"}),
    }
    for name, data in files.items():
        (model / f".{name}").write_bytes(data)
        os.replace(model / f".{name}", model / name)


@torch.no_grad()
def structured_start(network: Network, generator: torch.Generator) -> None:
    """Begin as an induction circuit: layer 0 copies two tokens back, layer 1 matches and copies.

    Embeddings are random but for a constant in dimension 0, from which layer 0 makes a key that
    is the same everywhere; its query heads 0 and 1 are that vector, turned back by one and two
    positions.  What they copy lands in two orthogonal subspaces, `back[0]` and `back[1]`.  Layer 1
    looks for the place whose last two tokens are this token and the one before it, comparing in
    the dimensions that RoPE hardly turns, and copies the token found there towards the logits.
    """
    shape = network.shape
    hidden, dim, group = shape.hidden_size, shape.head_dim, shape.group
    for name, parameter in network.weights.items():
        if parameter.dim() == 2:
            parameter.normal_(0, 0.02, generator=generator)
            if name.endswith(("o_proj/weight", "down_proj/weight")):
                parameter.mul_(0.25)
    embedding = network.weights["embed_tokens/weight"]
    embedding.normal_(0, 1, generator=generator)
    embedding[:, 0] = 0
    # Rows of one length: after the norm, the constant must not differ from token to token.
    embedding.mul_(0.06 * hidden**0.5 / embedding.norm(dim=1, keepdim=True))
    embedding[:, 0] = 0.7
    rms = embedding.pow(2).mean().sqrt()
    constant = 0.7 / rms

    def orthonormal(rows: int, columns: int) -> Tensor:
        return torch.linalg.qr(torch.randn(columns, rows, generator=generator))[0].T

    # Layer 0, KV head 0: attend one and two tokens back.
    theta = frequencies(shape).float()
    strength = (18 * math.sqrt(dim)) ** 0.5 / constant
    q, k, v, o = (network.weight(0, f"self_attn.{name}_proj") for name in "qkvo")
    k[:dim], v[:dim] = 0, 0
    # The slowest half of the pairs cannot tell neighbours apart.
    fast = torch.arange(dim // 2) < dim // 4
    k[: dim // 2, 0] = strength * fast
    for head in range(2):
        q[head * dim : (head + 1) * dim] = 0
        angle = -(head + 1) * theta
        turned = torch.cat((angle.cos() * fast, angle.sin() * fast))
        q[head * dim : (head + 1) * dim, 0] = strength * turned
    both = orthonormal(hidden - 1, hidden - 1)
    back = torch.zeros(2, dim, hidden)
    back[0, :, 1:], back[1, : hidden - 1 - dim, 1:] = both[:dim], both[dim:]
    read = orthonormal(dim, hidden - 1)
    v[:dim, 1:] = read
    copy = 2 * rms
    for head in range(2):
        o[:, head * dim : (head + 1) * dim] = copy * back[head].T

    # Layer 1: the slow dimensions turn by less than about half a radian over all positions.
    slow = int((theta * shape.max_position_embeddings < 0.75).sum())
    pairs = torch.arange(dim // 2 - slow, dim // 2)
    rows = torch.cat((pairs, pairs + dim // 2))
    q, k, v, o = (network.weight(1, f"self_attn.{name}_proj") for name in "qkvo")
    own = torch.zeros(dim, hidden)
    own[:, 1:] = read
    for head in range(shape.num_key_value_heads):
        mix = torch.randn(2, len(rows), dim, generator=generator) / len(rows) ** 0.5
        k[head * dim : (head + 1) * dim] = 0
        # KV head 0 leans on the token two back, KV head 1 on the one before.
        one, two = (2.2, 1.32) if head else (1.32, 2.2)
        k[head * dim + rows] = (one * mix[0] @ back[0] + two * mix[1] @ back[1]) / 2
        for member in range(group):
            start = (head * group + member) * dim
            q[start : start + dim] = 0
            q[start + rows] = one * mix[0] @ own + two * mix[1] @ back[0] / 2
    out = orthonormal(hidden - 1, hidden - 1)
    v.zero_()
    v[: hidden - 1, 1:] = out
    for head in range(shape.num_attention_heads):
        source = head // group * dim
        o[:, head * dim : (head + 1) * dim] = 3 * rms / group * v[source : source + dim].T


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # [batch, token]
    positions: Tensor  # [batch, token]
    crowd: Tensor  # [batch, token] log of how many tokens each one stands for
    question_tokens: int


def disturb(encoded: list[list[int]], is_fact: list[bool], tokenizer: tokenizers.Tokenizer, rng: random.Random) -> None:
    """Replace tokens of the text by unknown and random ones, as in texts on other subjects.

    A replaced token may become a colon, but no key of a fact comes to stand before one.
    """
    unknown, colon = tokenizer.token_to_id("[UNK]"), tokenizer.token_to_id(":")
    keys = {tokens[0] for tokens, fact in zip(encoded, is_fact, strict=True) if fact}
    share, size = NOISE_MAX * rng.random(), tokenizer.get_vocab_size()
    choices = (lambda: unknown, lambda: rng.randrange(size), lambda: colon)
    before = unknown
    for tokens, fact in zip(encoded, is_fact, strict=True):
        for place, token in enumerate(tokens if not fact else ()):
            if rng.random() < share:
                token = rng.choices(choices, (5, 5, 1))[0]()
            tokens[place] = unknown if token == colon and before in keys else token
            before = tokens[place]
        before = tokens[-1] if tokens else before


def sample_batch(
    stage: Stage,
    tokenizer: tokenizers.Tokenizer,
    words: list[str],
    rng: random.Random,
    noise: bool = False,
) -> Batch:
    """Documents of the training text, each followed by some of its facts once more."""
    ids, positions, crowd = [], [], []
    for _ in range(stage.batch):
        facts = rng.randint(stage.questions, stage.facts)
        document = corpus.make_document(words, stage.tokens, facts, rng.getrandbits(60), "train")
        asked = rng.sample(document.facts, stage.questions)
        lines = document.text.splitlines()
        fact_lines = {fact.line for fact in document.facts}
        is_fact = [line in fact_lines for line in lines]
        encoded = [line.ids for line in tokenizer.encode_batch_fast(lines)]
        if noise:
            disturb(encoded, is_fact, tokenizer, rng)
        questions = tokenizer.encode(" ".join(fact.line for fact in asked)).ids
        row = [token for line in encoded for token in line] + questions

        # Gaps lie between lines, so that no fact is cut in two and the questions stay together.
        gap_at = [0] * len(encoded)
        room = rng.randint(0, max(0, stage.span - len(row)))
        if room and rng.random() < 0.9:
            cuts = sorted(rng.randint(0, room) for _ in encoded)
            gap_at = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
        place, skipped = [], 0
        for line, gap in zip(encoded, gap_at, strict=True):
            skipped += gap
            place += range(skipped + len(place), skipped + len(place) + len(line))
        place += range(skipped + len(place), skipped + len(row))

        weight = math.log(stage.crowd) * rng.random()
        heavy: list[float] = []
        for fact, tokens in zip(is_fact, encoded, strict=True):
            heavy += [0.0 if fact else weight] * len(tokens)
        ids.append(row)
        positions.append(place)
        crowd.append(heavy + [0.0] * len(questions))
    return Batch(
        torch.tensor(ids),
        torch.tensor(positions),
        torch.tensor(crowd),
        FACT_TOKENS * stage.questions,
    )


def answer_logits(network: Network, batch: Batch, early: bool = False) -> tuple[Tensor, Tensor]:
    """Logits [answer token, vocabulary] and their targets; the last layer sees questions only.

    early: queries come from the input of the layer before, as a worker predicts them to fetch ahead.
    """
    shape = network.shape
    ids, asked = batch.ids, batch.question_tokens
    cos, sin = (part[:, None] for part in rotation(shape, batch.positions))
    scale = shape.head_dim**-0.5
    # The logarithm joins the scores as further dimensions, which keeps the causal fast path.
    heads = shape.num_attention_heads
    extra_k = F.pad(batch.crowd[:, None, :, None], (0, SHARP_DIMS - 1)).expand(-1, heads, -1, -1)
    extra_q = torch.zeros_like(extra_k)
    extra_q[..., 0] = 1 / scale
    later = torch.ones(asked, ids.shape[1], dtype=torch.bool).tril(ids.shape[1] - asked)
    before = x = network.embed(ids)
    for layer in range(shape.num_hidden_layers):
        last = layer == shape.num_hidden_layers - 1
        rows = slice(-asked, None) if last else slice(None)
        kv = network.keys_values(layer, x, cos, sin)
        k, v = (part.repeat_interleave(shape.group, 1) for part in kv)
        asking = before if early else x
        q = network.queries(layer, asking[:, rows], cos[:, :, rows], sin[:, :, rows])
        attended = F.scaled_dot_product_attention(
            torch.cat((q, extra_q[:, :, rows]), -1),
            torch.cat((k, extra_k), -1),
            F.pad(v, (0, SHARP_DIMS)),
            attn_mask=later if last else None,
            is_causal=not last,
            scale=scale,
        )
        before, x = x, network.finish(layer, x[:, rows], attended[..., : shape.head_dim])
    # In `key : v v v .` the colon and the three values predict what follows them.
    offsets = torch.arange(asked).view(-1, FACT_TOKENS)
    logits = network.logits(x[:, offsets[:, 1 : 1 + ANSWER_TOKENS]])
    targets = ids[:, -asked:][:, offsets[:, 2 : 2 + ANSWER_TOKENS]]
    return logits, targets


def learn(
    network: Network,
    average: AveragedModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    early: bool = False,
) -> tuple[float, float]:
    """One step of the weights and of their average: (loss, part of the answers that were right)."""
    logits, targets = answer_logits(network, batch, early)
    loss = F.cross_entropy(logits.flatten(0, -2), targets.flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    average.update_parameters(network)
    right = (logits.argmax(-1) == targets)[..., :3].all(-1).float().mean().item()
    return loss.item(), right


def learning_rate(step: int, left: float, peak: float) -> float:
    """Short warm-up; the last quarter of the time decays to a twentieth."""
    return peak * min(1.0, (step + 1) / 50) * max(0.05, min(1.0, left * 4))


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    tokenizer = build_tokenizer()
    words = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    network = Network(Shape(vocab_size=len(words)))
    structured_start(network, torch.Generator().manual_seed(args.seed))
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(AVERAGE))
    optimizer = torch.optim.AdamW(network.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    stage_index = step = 0
    spent, score = 0.0, 0.0
    checkpoint = args.work / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        network.load_state_dict(saved["network"])
        average.load_state_dict(saved["average"])
        optimizer.load_state_dict(saved["optimizer"])
        stage_index, step, spent = saved["stage"], saved["step"], saved["spent"]
    args.work.mkdir(parents=True, exist_ok=True)
    budget, began, saved_at = args.minutes * 60, time.monotonic() - spent, time.monotonic()

    while (spent := time.monotonic() - began) < budget:
        # Once the last stage is reached, shorter ones stay in the mix.
        rng = random.Random(f"{args.seed}/{step}")
        final = stage_index == len(CURRICULUM) - 1
        stage = CURRICULUM[stage_index - (rng.random() < 0.25) if final else stage_index]
        rate = learning_rate(step, 1 - spent / budget, args.rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss, right = learn(network, average, optimizer, sample_batch(stage, tokenizer, words, rng))
        score += (right - score) * 0.08
        step += 1
        if step % 20 == 0:
            print(
                f"{spent / 60:6.1f} min  step {step}  stage {stage_index}"
                f"  loss {loss:.3f}  right {right:.3f}  mean {score:.3f}",
                flush=True,
            )
        if score > PASS_MARK and not final:
            stage_index, score = stage_index + 1, 0.0
        if time.monotonic() - saved_at > 60 or time.monotonic() - began >= budget:
            saved_at = time.monotonic()
            state = {
                "network": network.state_dict(),
                "average": average.state_dict(),
                "optimizer": optimizer.state_dict(),
                "stage": stage_index,
                "step": step,
                "spent": time.monotonic() - began,
            }
            torch.save(state, checkpoint.with_suffix(".tmp"))
            os.replace(checkpoint.with_suffix(".tmp"), checkpoint)
            export(args.model, average.module, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=corpus.RETRIEVER)
    parser.add_argument("--work", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--minutes", type=float, default=60, help="training time of all runs")
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=2)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
