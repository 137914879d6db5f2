"""Checkpoints whose next-token logits depend on the last token only, so that outputs are scripted (BIGRAM, CHAIN).

They cannot see faults of attention, the KV cache or positions: use the tiny random model for those.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tests.support.checkpoints import layer_shapes, write_checkpoint

UNLISTED = -30.0  # logit of a pair that the table leaves out
STRONG = 20.0  # logit of CHAIN's successor


def bigram_checkpoint(
    path: Path,
    table: Mapping[int, Mapping[int, float]],
    vocab_size: int,
    *,
    tokenizer: tokenizers.Tokenizer | None = None,
    eos: int | list[int] | None = None,
    generation_eos: int | list[int] | None = None,
    tokenizer_options: Mapping[str, Any] | None = None,
    **config_overrides: Any,
) -> Path:
    """A Llama directory where the logit of j after t is table[t][j] (to 0.02%), -30 where unlisted; returns `path`.

    The hidden state of token t is the one-hot vector of t: attention and MLP add zeros. After RMSNorm it has length
    sqrt(V), so lm_head[j, t] = table[t][j] / sqrt(V). `eos` goes to config.json, `generation_eos` to
    generation_config.json (absent when None).
    """
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": vocab_size,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": eos,
        **config_overrides,
    }
    head = np.full((vocab_size, vocab_size), UNLISTED / math.sqrt(vocab_size), np.float32)
    for last, row in table.items():
        for following, logit in row.items():
            head[following, last] = logit / math.sqrt(vocab_size)
    tensors = {
        "model.embed_tokens.weight": np.eye(vocab_size, dtype=np.float32),
        "model.norm.weight": np.ones(vocab_size, np.float32),
        "lm_head.weight": head,
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config).items():
            fill = np.ones if name.endswith("layernorm.weight") else np.zeros
            tensors[f"model.layers.{layer}.{name}"] = fill(shape, np.float32)
    return write_checkpoint(
        path,
        config,
        tensors,
        generation_eos=generation_eos,
        tokenizer=tokenizer,
        shards=1,
        tokenizer_options=tokenizer_options,
    )


def chain_checkpoint(path: Path, ids: Sequence[int], vocab_size: int, **options: Any) -> Path:
    """A BIGRAM directory whose greedy continuation of prompt [ids[0]] is ids[1:]; options as for bigram_checkpoint.

    After the last id (unless it has a successor earlier in the chain) it repeats itself for ever.
    Each id may have one successor only: ValueError otherwise.
    """
    return bigram_checkpoint(path, chain_table([ids]), vocab_size, **options)


def chain_table(chains: Sequence[Sequence[int]]) -> dict[int, dict[int, float]]:
    """The table in which each chain's ids follow one another; several chains may share a checkpoint."""
    table: dict[int, dict[int, float]] = {}
    for ids in chains:
        for last, following in itertools.pairwise(ids):
            if table.setdefault(last, {following: STRONG}) != {following: STRONG}:
                raise ValueError(f"token {last} needs one successor, got {list(table[last])} and {following}")
    for ids in chains:
        table.setdefault(ids[-1], {ids[-1]: STRONG})
    return table
