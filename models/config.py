"""What a checkpoint's config says about the model: shapes, switches and end-of-sequence ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpaged.models.rope_config import RopeConfig, positive_number

__all__ = ["ModelConfig", "RopeConfig"]

logger = logging.getLogger(__name__)

# Hugging Face's name -> ours
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_pytorch_tanh",
    "gelu_pytorch_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}
_DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass(frozen=True, kw_only=True)
class _Family:
    """What transformers assumes for an architecture where config.json is silent, and what it fixes."""

    model_type: str
    max_position: int
    num_kv_heads: int | None  # None: as many as query heads
    qkv_bias: bool | None  # None: the config's attention_bias decides, for the output projection too
    window: int | None  # sliding_window where the key is absent (null always means none)
    uses_window: bool  # use_sliding_window where the key is absent
    first_window_layer: int | None  # max_window_layers where the key is absent
    needs_layer_types: bool  # a window counts only for layers that layer_types marks as sliding


_FAMILIES = {
    "LlamaForCausalLM": _Family(
        model_type="llama",
        max_position=2048,
        num_kv_heads=None,
        qkv_bias=None,
        window=None,
        uses_window=True,
        first_window_layer=None,
        needs_layer_types=True,
    ),
    "MistralForCausalLM": _Family(
        model_type="mistral",
        max_position=131_072,
        num_kv_heads=8,
        qkv_bias=False,
        window=4096,
        uses_window=True,
        first_window_layer=None,
        needs_layer_types=False,
    ),
    "MinistralForCausalLM": _Family(
        model_type="ministral",
        max_position=131_072,
        num_kv_heads=8,
        qkv_bias=False,
        window=4096,
        uses_window=True,
        first_window_layer=None,
        needs_layer_types=False,
    ),
    "Qwen2ForCausalLM": _Family(
        model_type="qwen2",
        max_position=32_768,
        num_kv_heads=32,
        qkv_bias=True,
        window=4096,
        uses_window=False,
        first_window_layer=28,
        needs_layer_types=False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model of the Llama family. Sizes are numbers of elements, max_position is in tokens."""

    architecture: str  # Hugging Face's class name
    vocab_size: int
    hidden_size: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    hidden_act: str  # silu, gelu, gelu_pytorch_tanh or relu
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool  # of the q, k and v projections
    attention_out_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]  # per layer; W: query i sees keys i - W + 1 .. i; None: all keys up to i
    max_position: int  # max_position_embeddings as the config states it; see context_length
    eos_ids: frozenset[int]  # config.json and generation_config.json together; the tokenizer may know more
    bos_id: int | None
    dtype: str  # of the checkpoint's weights

    @property
    def context_length(self) -> int:
        """Longest sequence the model is meant for, in tokens, rope scaling included."""
        return self.rope.context_length(self.max_position)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None) -> ModelConfig:
        """Read config.json's and generation_config.json's contents (the latter is None where there is no file).

        Absent keys get the value transformers gives them. Raises ValueError naming the key for an unknown
        architecture, rope type or activation, a missing or impossible size, or a switch that is not supported.
        """
        architecture, family = _architecture(config)
        _refuse_unsupported(config)
        hidden_size, num_heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
        num_layers = _size(config, "num_hidden_layers")
        head_dim = _head_dim(config, hidden_size, num_heads)
        max_position = _size(config, "max_position_embeddings", family.max_position)
        qkv_bias = _flag(config, "attention_bias") if family.qkv_bias is None else family.qkv_bias
        return cls(
            architecture=architecture,
            vocab_size=_size(config, "vocab_size"),
            hidden_size=hidden_size,
            mlp_dim=_size(config, "intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(config, family, num_heads),
            head_dim=head_dim,
            norm_eps=positive_number("rms_norm_eps", config.get("rms_norm_eps", 1e-6)),
            hidden_act=_activation(config),
            rope=RopeConfig.from_hf(config, head_dim=head_dim, max_position=max_position),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            attention_bias=qkv_bias,
            attention_out_bias=qkv_bias if family.qkv_bias is None else False,
            mlp_bias=_flag(config, "mlp_bias") if architecture == "LlamaForCausalLM" else False,
            windows=_windows(config, family, num_layers),
            max_position=max_position,
            eos_ids=_eos_ids(config, "config.json") | _eos_ids(generation_config or {}, "generation_config.json"),
            bos_id=_bos_id(config),
            dtype=_dtype(config),
        )


def _architecture(config: Mapping[str, Any]) -> tuple[str, _Family]:
    """From architectures or, where that is absent, from model_type."""
    names = config.get("architectures") or [
        name for name, family in _FAMILIES.items() if family.model_type == config.get("model_type")
    ]
    if isinstance(names, list) and names and names[0] in _FAMILIES:
        return names[0], _FAMILIES[names[0]]
    raise ValueError(
        f"unsupported architecture {names or config.get('model_type')!r}; supported: {', '.join(_FAMILIES)}"
    )


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"quantization_config (method {method!r}) is not supported; use the unquantised checkpoint or a GGUF file"
        )


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key, default)
    if value is None:
        raise ValueError(f"the config has no {key}; it must be a positive integer")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key} must be a positive integer, got {value!r}")
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} must be true, false or null, got {value!r}")
    return bool(value)


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int) -> int:
    if config.get("head_dim") is not None:
        return _size(config, "head_dim")
    if hidden_size % num_heads:
        raise ValueError(
            f"hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads}; such a config must "
            "state head_dim"
        )
    return hidden_size // num_heads


def _num_kv_heads(config: Mapping[str, Any], family: _Family, num_heads: int) -> int:
    if "num_key_value_heads" in config:
        kv_heads = num_heads if config["num_key_value_heads"] is None else _size(config, "num_key_value_heads")
    else:
        kv_heads = family.num_kv_heads or num_heads
    if num_heads % kv_heads:
        raise ValueError(f"num_attention_heads {num_heads} must be a multiple of num_key_value_heads {kv_heads}")
    return kv_heads


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise ValueError(f"unsupported hidden_act {name!r}; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _windows(config: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer. use_sliding_window false or null and sliding_window null mean full attention.

    Example (Qwen2): 4 layers, use_sliding_window true, sliding_window 8, max_window_layers 3, no layer_types
    -> (None, None, None, 8).
    """
    layer_types = _layer_types(config, num_layers)
    enabled = bool(config.get("use_sliding_window", family.uses_window))
    window = config.get("sliding_window", family.window)
    if not enabled:
        return (None,) * num_layers
    if window is None:
        if layer_types and "sliding_attention" in layer_types:
            raise ValueError("layer_types names sliding_attention layers but sliding_window is null; state the window")
        return (None,) * num_layers
    window = _size({"sliding_window": window}, "sliding_window")
    if layer_types:
        return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    if family.needs_layer_types:
        logger.warning("sliding_window %d is ignored: transformers does not apply it to this architecture", window)
        return (None,) * num_layers
    first = config.get("max_window_layers", family.first_window_layer)
    return tuple(window if first is None or layer >= first else None for layer in range(num_layers))


def _layer_types(config: Mapping[str, Any], num_layers: int) -> list[str] | None:
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ValueError(f"layer_types must list one type for each of the {num_layers} layers, got {kinds!r}")
    unknown = sorted({repr(kind) for kind in kinds} - {"'full_attention'", "'sliding_attention'"})
    if unknown:
        raise ValueError(f"unsupported layer_types {', '.join(unknown)}; supported: full_attention, sliding_attention")
    return kinds


def _eos_ids(config: Mapping[str, Any], file: str) -> frozenset[int]:
    """eos_token_id is an integer, a list of them, null or absent."""
    value = config.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise ValueError(f"eos_token_id in {file} must be a token id or a list of them, got {value!r}")
    return frozenset(ids)


def _bos_id(config: Mapping[str, Any]) -> int | None:
    value = config.get("bos_token_id")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ValueError(f"bos_token_id must be a token id or null, got {value!r}")
    return value


def _dtype(config: Mapping[str, Any]) -> str:
    """The weights' type; newer configs call it dtype, older ones torch_dtype."""
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ValueError(f"unsupported dtype {name!r} in the config; supported: {', '.join(_DTYPES)}")
    return name
