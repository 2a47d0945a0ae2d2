"""Go on training a retriever on noisy and longer texts, with a layer more if asked: block expansion.

    python -m models.grow --model models/retriever --at 1 --minutes 15

Without `--at` no layer is inserted.  The new layer is a copy of the one at `at` whose two outputs
are zero, so it changes nothing at first.  Why: layer 0 writes what the induction layer's query is
made of.  A query that is predicted one layer ahead, from the input of the layer before, can only be
right if another layer lies between the two.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from pathlib import Path

import tokenizers
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from models import corpus
from models.evaluate import load
from models.network import Network
from models.train import AVERAGE, REFINEMENT, export, learn, learning_rate, sample_batch

SILENT = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def grown(network: Network, at: int) -> Network:
    """A network with one layer more, before layer `at`, that computes the same."""
    shape = network.shape
    larger = Network(replace(shape, num_hidden_layers=shape.num_hidden_layers + 1))
    tensors = {}
    for name, value in network.tensors().items():
        parts = name.split(".")
        if parts[1] != "layers":
            tensors[name] = value
            continue
        layer, rest = int(parts[2]), ".".join(parts[3:])
        tensors[f"model.layers.{layer + (layer >= at)}.{rest}"] = value
        if layer == at:
            tensors[f"model.layers.{at}.{rest}"] = torch.zeros_like(value) if rest in SILENT else value
    larger.load_tensors(tensors)
    return larger


def refine(network: Network, tokenizer: tokenizers.Tokenizer, args: argparse.Namespace) -> Network:
    """Trains on the curriculum's last stages for `args.minutes`; returns the moving average."""
    words = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    average = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(AVERAGE))
    optimizer = torch.optim.AdamW(network.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    began, step, score = time.monotonic(), 0, 0.0
    while (spent := (time.monotonic() - began) / 60) < args.minutes:
        rng = random.Random(f"{args.seed}/grow/{step}")
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, 1 - spent / args.minutes, args.rate)
        batch = sample_batch(rng.choice(REFINEMENT), tokenizer, words, rng, noise=True)
        loss, right = learn(network, average, optimizer, batch, early=step % 2 == 1)
        score, step = score + (right - score) * 0.08, step + 1
        if step % 20 == 0:
            print(f"{spent:6.1f} min  step {step}  loss {loss:.3f}  mean {score:.3f}", flush=True)
    return average.module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=corpus.RETRIEVER, help="read and replaced")
    parser.add_argument("--at", type=int, help="insert a layer before this one")
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--seed", type=int, default=20261120)
    parser.add_argument("--rate", type=float, default=5e-4, help="peak learning rate")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    network, tokenizer = load(args.model)
    if args.at is not None:
        network = grown(network, args.at)
    export(args.model, refine(network, tokenizer, args), tokenizer)


if __name__ == "__main__":
    main()
