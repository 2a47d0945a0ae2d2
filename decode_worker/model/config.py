"""The architecture of a checkpoint, read from its config.json."""

from dataclasses import dataclass
from typing import Literal, cast, get_args

from decode_worker.model.errors import CheckpointError
from decode_worker.model.json_object import JsonObject
from decode_worker.model.rope import RopeConfig

Architecture = Literal["llama", "mistral", "qwen2", "qwen3", "phi3"]

HEAD_DIM_UNIT = 16  # elements that attention kernels take at a time

_CAUSAL_LM = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and switches of a decoder-only model; all sizes are in elements or tokens.

    ``sliding_window`` is the length of the *active* window, None where attention is full.
    ``fused`` says that the checkpoint stores qkv and gate_up as one tensor each (Phi-3).
    """

    architecture: Architecture
    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    norm_eps: float
    rope: RopeConfig
    max_positions: int
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    fused: bool
    sliding_window: int | None

    @classmethod
    def parse(cls, config: JsonObject) -> "ModelConfig":
        """Raises CheckpointError for an unknown architecture or a missing or unusable value."""
        architecture = _parse_architecture(config)
        if config.has("quantization_config"):
            config.fail("quantization_config", "absent: take the checkpoint that is not quantised")
        if config.values.get("hidden_act", "silu") != "silu":
            config.fail("hidden_act", "silu")
        hidden, q_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        # Only Llama and Phi-3 without the key mean one KV head per query head.
        multi_head = q_heads if architecture in ("llama", "phi3") else None
        kv_heads = config.integer("num_key_value_heads", multi_head)
        if q_heads % kv_heads:
            config.fail("num_key_value_heads", f"a divisor of num_attention_heads {q_heads}")
        head_dim = config.integer("head_dim", 128 if architecture == "qwen3" else hidden // q_heads)
        if head_dim % HEAD_DIM_UNIT:
            origin = "" if config.has("head_dim") else " (hidden_size / num_attention_heads)"
            raise CheckpointError(
                f"{config.where}: head_dim is {head_dim}{origin}; attention supports multiples of {HEAD_DIM_UNIT}, "
                "such as 64, 80, 96 and 128: use a checkpoint that has one"
            )
        max_positions = config.integer("max_position_embeddings")
        rope = RopeConfig.parse(config, head_dim, max_positions)
        if rope.rotary_dim != head_dim and architecture != "phi3":
            config.fail("partial_rotary_factor", f"absent or 1 for {architecture}")
        layers = config.integer("num_hidden_layers")
        bias = architecture in ("llama", "qwen3") and config.flag("attention_bias", False)
        return cls(
            architecture=architecture,
            layers=layers,
            hidden=hidden,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=config.integer("intermediate_size"),
            vocab=config.integer("vocab_size"),
            norm_eps=config.number("rms_norm_eps"),
            rope=rope,
            max_positions=max_positions,
            tie_embeddings=config.flag("tie_word_embeddings", False),
            qkv_bias=bias or architecture == "qwen2",
            output_bias=bias,
            mlp_bias=architecture == "llama" and config.flag("mlp_bias", False),
            qk_norm=architecture == "qwen3",
            fused=architecture == "phi3",
            sliding_window=_parse_sliding_window(config, architecture, layers),
        )

    @property
    def context_max(self) -> int:
        """The longest context, in tokens, that the positions of this model cover."""
        if self.rope.kind == "linear":
            return int(self.max_positions * self.rope.factor)
        if self.rope.kind == "yarn":
            return max(self.max_positions, int(self.rope.original_positions * self.rope.factor))
        return self.max_positions

    def check_prompt(self, tokens: int, declared_max: int) -> None:
        """Raises ValueError for a prompt that sessions of up to ``declared_max`` tokens would rotate wrongly.

        LongRoPE has factors for sequences of up to ``original_positions`` tokens and others for all tokens of longer
        ones, and stored keys cannot be rotated again when a session grows past the switch. So a session of the long
        factors begins behind it, and one of the short factors is declared to end before it.
        """
        trained = self.rope.original_positions
        if self.rope.uses_long_factor(declared_max) and tokens <= trained:
            raise ValueError(
                f"the prompt has {tokens} tokens, which this model rotates by its short factors, as all sequences of "
                f"up to {trained} tokens, but context={declared_max} chose the long ones: give --context {trained} or "
                f"less, or a prompt of more than {trained} tokens"
            )

    def check_context(self, declared_max: int) -> None:
        """Raises CheckpointError unless ``declared_max`` tokens of context are computed exactly."""
        if not 1 <= declared_max <= self.context_max:
            raise CheckpointError(
                f"context={declared_max} tokens, but this model covers 1 to {self.context_max}: give --context "
                f"{self.context_max} or less, or set a RoPE scaling in config.json"
            )
        if self.sliding_window is not None and declared_max > self.sliding_window:
            raise CheckpointError(
                f"config.json: sliding_window is {self.sliding_window}, shorter than context={declared_max} tokens; "
                f"sliding windows are not supported: give --context {self.sliding_window} or less, or use a checkpoint "
                "with full attention"
            )


def _parse_architecture(config: JsonObject) -> Architecture:
    name = config.values.get("model_type")
    if name not in _CAUSAL_LM:
        config.fail("model_type", f"one of {', '.join(get_args(Architecture))}")
    classes = config.values.get("architectures")
    if classes is not None and classes != [_CAUSAL_LM[name]]:
        config.fail("architectures", f'["{_CAUSAL_LM[name]}"] for model_type {name}')
    return cast(Architecture, name)


def _parse_sliding_window(config: JsonObject, architecture: Architecture, layers: int) -> int | None:
    """The window that some layer really uses: each family has its own way to switch it off."""
    if architecture == "llama":
        return None
    if architecture in ("qwen2", "qwen3"):
        if not config.flag("use_sliding_window", False):
            return None
        if config.has("layer_types"):
            active = "sliding_attention" in config.values["layer_types"]
        else:
            active = config.values.get("max_window_layers", 28) < layers
        return config.integer("sliding_window", 4096) if active else None
    if architecture == "mistral" and "sliding_window" not in config.values:
        return 4096  # the default of Mistral 7B v0.1; later checkpoints say null
    return config.integer("sliding_window") if config.has("sliding_window") else None
