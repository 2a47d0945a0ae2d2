"""Measure the retriever on documents of the split `eval` and write its profile.

python -m models.calibrate --context 8192 --questions 100
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from decode_worker.calibration.report import calibrate
from decode_worker.demo.document import load_words
from models import corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=corpus.RETRIEVER, help="checkpoint directory")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--questions", type=int, default=64, help="facts, and questions, of a document")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    words = load_words(args.model)
    seeds = range(args.documents)
    documents = [corpus.make_document(words, args.context, args.questions, seed, "eval") for seed in seeds]
    calibrate(args.model, documents, args.context)


if __name__ == "__main__":
    main()
