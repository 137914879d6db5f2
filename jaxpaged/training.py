"""Log-probabilities of whole sequences as a differentiable function of the engine's own weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxpaged.models.forward import Backends, CausalLM, ForwardInput
from jaxpaged.pallas_kernels import AttentionBatch, TileConfig

_BACKENDS = Backends(attention="reference", matmul="xla")  # the differentiable ones
_TILES = TileConfig(decode_lanes=1, decode_kv=1, prefill_queries=1, prefill_kv=1)  # the reference has no tiles


def token_logprobs(graphdef: Any, state: Any, token_ids: Int[Array | np.ndarray, "B T"]) -> Float[Array, "B T-1"]:
    """How probable each token is after those before it, float32; the first one, after nothing, is left out.

    graphdef and state are what LLM.model_state() gives: the model is the one that serves, so the numbers are those of
    generation up to rounding. Sequences shorter than T are padded at their ends, with any ids; what is said of padding
    is to be left out. Can be jitted, differentiated by state, and sharded along B.

    One sequence after the other is computed (and once more in a gradient's backward pass), in memory for T · T keys
    of a layer: meant for short sequences. Raises ValueError for a model with dynamic rope.
    """
    model = nnx.merge(graphdef, state)
    assert isinstance(model, CausalLM)
    if model.config.rope.kind == "dynamic":
        raise ValueError(
            "token_logprobs: wanted a model whose rope does not depend on the prompt's length, got dynamic"
        )
    # Arrays alone cross the border of lax.map: the module is made anew inside.
    one = jax.checkpoint(lambda ids: _one(nnx.merge(graphdef, state), ids))
    return jax.lax.map(one, jnp.asarray(token_ids))


def _one(model: CausalLM, ids: Int[Array, " T"]) -> Float[Array, " T-1"]:
    length, config = ids.shape[0], model.config
    every = jnp.arange(length, dtype=jnp.int32)
    number, none = jnp.int32, jnp.zeros(0, jnp.int32)
    batch = AttentionBatch(
        block_tables=jnp.zeros((1, 1), number),  # one block holds the sequence
        kv_lens=jnp.full(1, length, number),
        query_starts=jnp.array([0, length], number),
        num_decodes=jnp.zeros((), number),
        tile_rows=none,
        tile_starts=none,
        num_tiles=jnp.zeros((), number),
        tiles=_TILES,
    )
    step = ForwardInput(tokens=ids, positions=every, rope_lens=every + 1, slot_mapping=every, attention=batch)
    empty = jnp.zeros((1, config.num_kv_heads, length, config.head_dim), jax.tree.leaves(nnx.state(model))[0].dtype)
    hidden, _ = model.backbone(step, ((empty, empty),) * config.num_layers, _BACKENDS)
    logprobs = jax.nn.log_softmax(model.logits(hidden[:-1], _BACKENDS), axis=-1)
    return jnp.take_along_axis(logprobs, ids[1:, None], 1)[:, 0]
