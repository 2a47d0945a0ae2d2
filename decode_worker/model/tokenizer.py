"""The tokenizer of a checkpoint: text to ids, ids to text, and text as it is generated."""

from pathlib import Path

import tokenizers

from decode_worker.model.errors import CheckpointError
from decode_worker.model.json_object import JsonObject

_REPLACEMENT = "\ufffd"
# A character in progress spans fewer ids than this; a longer run is bytes that never form one.
_PENDING_MAX = 16


class Tokenizer:
    """tokenizer.json of a checkpoint and the ids that end a sequence (``eos_ids``)."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_ids = eos_ids

    @classmethod
    def load(cls, directory: Path, vocab: int) -> "Tokenizer":
        """Reads tokenizer.json, and eos ids from generation_config.json or else config.json.

        ``vocab`` is the model's number of embeddings; a tokenizer may have fewer tokens (padded
        embeddings), never more. Raises CheckpointError for that and for unreadable files.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing; fetch it with the checkpoint, or save it with save_pretrained of a fast tokenizer"
            )
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise CheckpointError(f"{path} is not a tokenizer ({error}); fetch it again") from error
        highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if highest >= vocab:
            raise CheckpointError(
                f"tokenizer.json has token id {highest}, but vocab_size in config.json is {vocab}; "
                "tokenizer and weights are of different models: fetch both from one checkpoint"
            )
        return cls(tokenizer, _read_eos_ids(directory, vocab))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; special tokens as the tokenizer's template places them."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def stream(self) -> "TextStream":
        """A decoder for one sequence that is being generated."""
        return TextStream(self)


class TextStream:
    """Turns generated ids into text piece by piece; the pieces together are the whole text.

    Each call decodes only the last few ids,
    and holds back a character whose bytes are not complete yet.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._shown: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that ``token`` completes, possibly empty."""
        self._pending.append(token)
        piece = self._piece()
        if piece.endswith(_REPLACEMENT) and len(self._pending) < _PENDING_MAX:
            return ""
        return self._show(piece)

    def finish(self) -> str:
        """The text of bytes held back when the sequence ends."""
        return self._show(self._piece())

    def _piece(self) -> str:
        # The ids shown last are decoded again: a decoder may treat the first of its ids
        # differently, for example by dropping the space before it.
        shown = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._pending)[len(shown) :]

    def _show(self, piece: str) -> str:
        if piece:
            self._shown, self._pending = self._pending, []
        elif len(self._pending) >= _PENDING_MAX:
            self._pending = []  # ids without text, such as special tokens
        return piece


def _read_eos_ids(directory: Path, vocab: int) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        config = JsonObject.read(path) if path.exists() else JsonObject(name, {})
        if config.has("eos_token_id"):
            value = config.values["eos_token_id"]
            ids = value if isinstance(value, list) else [value]
            if not all(type(token) is int and 0 <= token < vocab for token in ids):
                config.fail("eos_token_id", f"a token id or a list of ids below vocab_size {vocab}")
            return frozenset(ids)
    return frozenset()
