"""llama.cpp through llama-cpp-python: the same weights as GGUF, its fastest cache, filled with random K and V.

The cache is filled by restoring a state that was never computed: evaluating 128K tokens would take most of an hour.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import itertools
import json
import timeit
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from bench.rivals.problem import NotRun, Problem, Step

FLASH = (0, 1)  # enum llama_flash_attn_type
KV_TYPES = {1: torch.float16, 30: torch.bfloat16}  # enum ggml_type
TRIAL_STEPS = 3
TOKEN = 7
# A state: magic, sequence, streams, cells (u32 each); a cell is (position, 1, sequence); then whether V is transposed,
# and the layers; of each layer K and V, each behind 12 bytes that say its type and row size.
STATE_WORDS = 4
CELL_WORDS = 3
LAYERS_WORDS = 2
PART_WORDS = 3


def prepare(problem: Problem) -> Step:
    """The fastest of flash attention on and off, float16 and bfloat16 in the cache."""
    _library()
    file = problem.checkpoint / "model.gguf"
    if not file.exists():
        write_gguf(problem.checkpoint, file)
    weights = Weights(file)
    fastest: tuple[float, Context] | None = None
    for flash, kv_type in itertools.product(FLASH, KV_TYPES):
        context = Context(weights, problem.context, problem.threads, flash, kv_type)
        context.fill()
        took = min(timeit.repeat(context.step, number=1, repeat=TRIAL_STEPS))
        if fastest is None or took < fastest[0]:
            fastest = took, context
    assert fastest is not None
    return fastest[1].step


class Weights:
    """A loaded GGUF file; its memory goes with the last reference."""

    def __init__(self, file: Path) -> None:
        library = _library()
        self.model = library.llama_model_load_from_file(str(file).encode(), library.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp does not load {file}")
        weakref.finalize(self, library.llama_model_free, self.model)


class Context:
    """A cache for `tokens` of one sequence. `flash` and `kv_type`: of FLASH and KV_TYPES."""

    def __init__(self, weights: Weights, tokens: int, threads: int, flash: int = 1, kv_type: int = 1) -> None:
        self._library, self._weights, self._tokens = _library(), weights, tokens
        parameters = self._library.llama_context_default_params()
        parameters.n_ctx, parameters.n_seq_max = tokens, 1
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = parameters.type_v = kv_type
        parameters.flash_attn_type = flash
        self._dtype = KV_TYPES[kv_type]
        self._context = self._library.llama_init_from_model(weights.model, parameters)
        if not self._context:
            raise RuntimeError(f"llama.cpp makes no context of {tokens} tokens, flash {flash}, type {kv_type}")
        weakref.finalize(self, self._library.llama_free, self._context)
        self._memory = self._library.llama_get_memory(self._context)
        self._vocab = self._library.llama_vocab_n_tokens(self._library.llama_model_get_vocab(weights.model))

    @property
    def end(self) -> int:
        """The position of the next token."""
        return self._library.llama_memory_seq_pos_max(self._memory, 0) + 1

    def decode(self, ids: Sequence[int]) -> np.ndarray:
        """Logits float32 [vocab] after the last of these tokens."""
        library = self._library
        tokens = (library.llama_token * len(ids))(*ids)
        failed = library.llama_decode(self._context, library.llama_batch_get_one(tokens, len(ids)))
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        return np.ctypeslib.as_array(library.llama_get_logits_ith(self._context, -1), (self._vocab,)).copy()

    def fill(self) -> None:
        """Random K and V for all tokens but the last."""
        if self.end == 0:
            self.decode([TOKEN])  # one cell, from which the state's layout is read
        state = _grown(self.state(), self._tokens - 1, self._dtype)
        taken = self._library.llama_state_seq_set_data(self._context, _bytes(state), state.nbytes, 0)
        if taken != state.nbytes or self.end != self._tokens - 1:
            raise RuntimeError(f"llama.cpp took {taken} of {state.nbytes} bytes of a state and ends at {self.end}")

    def step(self) -> np.ndarray:
        """One token behind the others, which is then given up again."""
        end = self.end
        logits = self.decode([TOKEN])
        if not self._library.llama_memory_seq_rm(self._memory, 0, end, -1):
            raise RuntimeError("llama.cpp does not give up its last token")
        return logits

    def state(self) -> np.ndarray:
        """Cells, K and V as llama.cpp saves them, uint8."""
        state = np.empty(self._library.llama_state_seq_get_size(self._context, 0), np.uint8)
        self._library.llama_state_seq_get_data(self._context, _bytes(state), state.nbytes, 0)
        return state


def _grown(state: np.ndarray, cells: int, dtype: torch.dtype) -> np.ndarray:
    """The state of one cell at position 0 -> uint8, one of `cells` with random K and V."""
    words = state.view(np.uint32)
    end = STATE_WORDS + CELL_WORDS
    if words[STATE_WORDS - 1 : end].tolist() != [1, 0, 1, 0]:
        raise RuntimeError("this llama.cpp writes its states in another layout")
    parts = 2 * int(words[end + 1])
    first = end + LAYERS_WORDS
    part_words = (len(words) - first) // parts
    header, table = words[:STATE_WORDS].copy(), np.tile(words[STATE_WORDS:end], (cells, 1))
    header[-1], table[:, 0] = cells, range(cells)
    content = torch.empty((part_words - PART_WORDS) * 4 // dtype.itemsize * cells, dtype=dtype).normal_()
    pieces = [header, table.ravel(), words[end:first]]
    for part in range(first, len(words), part_words):
        pieces += [words[part : part + PART_WORDS], content.view(torch.int32).numpy().view(np.uint32)]
    return np.concatenate(pieces).view(np.uint8)


def _bytes(array: np.ndarray) -> object:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


@functools.cache
def _library() -> ModuleType:
    """llama_cpp's C interface, silent. NotRun if it is not installed."""
    for name, package in (("llama_cpp", "llama-cpp-python"), ("gguf", "gguf")):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            raise NotRun(f"{package} is not installed") from None
    library = importlib.import_module("llama_cpp.llama_cpp")
    library.silent = library.llama_log_callback(lambda level, text, data: None)  # llama.cpp keeps a bare pointer
    library.llama_log_set(library.silent, None)
    library.llama_backend_init()
    return library


def write_gguf(checkpoint: Path, file: Path) -> None:
    """The checkpoint's weights, matrices in bfloat16, without a tokenizer."""
    import gguf
    from safetensors.torch import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    model_type, layers = config["model_type"], config["num_hidden_layers"]
    d = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer = gguf.GGUFWriter(file, model_type)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(layers)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(d)
    writer.add_value_length(d)
    writer.add_rope_dimension_count(d)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[model_type.upper()], layers)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        module, _, kind = name.rpartition(".")
        if model_type == "llama" and module.endswith(("q_proj", "k_proj")):
            # Its RoPE turns neighbouring dimensions, transformers' those half a head apart.
            tensor = tensor.view(-1, 2, d // 2, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        target = f"{names.get_name(module)}.{kind}"
        if tensor.dim() == 1:
            writer.add_tensor(target, tensor.float().numpy())
        else:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(target, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
