"""The Llama family: Llama 1-3, Mistral and their lookalikes, as one Flax NNX module."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxpaged.models.config import ModelConfig
from jaxpaged.models.forward import Backends, ForwardInput, KVPair
from jaxpaged.models.layers import Mlp, RMSNorm, rotate, value
from jaxpaged.models.matrices import MatrixForm, embed, linear, matrix, weight
from jaxpaged.models.rope import dynamic_inverse_frequencies, inverse_frequencies
from jaxpaged.pallas_kernels import AttentionSpec, paged_attention, write_kv


class Attention(nnx.Module):
    """Grouped-query attention. Heads are stored by KV head: its G query heads, its key, its value."""

    def __init__(self, config: ModelConfig, layer: int, form: MatrixForm, *, rngs: nnx.Rngs):
        k, h, d = config.num_kv_heads, config.head_dim, config.hidden_size
        g = config.num_heads // k
        self.qkv_kghd = matrix(rngs, (k, g + 2, h, d), ("kv_heads", None, None, "embed"), outputs=3, form=form)
        self.out_dkgh = matrix(
            rngs, (d, k, g, h), ("embed", "kv_heads", None, None), outputs=1, form=form, rough_input=True
        )
        has_bias = config.attention_bias
        self.qkv_bias_kgh = weight(rngs, (k, g + 2, h), form.dtype, ("kv_heads", None, None)) if has_bias else None
        self.out_bias_d = weight(rngs, (d,), form.dtype, ("embed",)) if config.attention_out_bias else None
        self.spec = AttentionSpec(scale=h**-0.5, window=config.windows[layer], soft_cap=None)

    def __call__(self, x, rope, step: ForwardInput, kv: KVPair, backends: Backends) -> tuple[Array, KVPair]:
        qkv = linear(x, self.qkv_kghd, value(self.qkv_bias_kgh), backends, outputs=3)  # [T, K, G + 2, H]
        rotated = rotate(qkv[:, :, :-1], *rope)
        q, k, v = rotated[:, :, :-1], rotated[:, :, -1], qkv[:, :, -1]
        kv = write_kv(*kv, k, v, step.slot_mapping)
        mixed = paged_attention(q, *kv, step.attention, self.spec, implementation=backends.attention)
        mixed = mixed.reshape(x.shape[0], -1)
        return linear(mixed, self.out_dkgh, value(self.out_bias_d), backends, outputs=1), kv


class Layer(nnx.Module):
    """x + attention(norm x), then + mlp(norm x)."""

    def __init__(self, config: ModelConfig, layer: int, form: MatrixForm, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, form.dtype, rngs=rngs)
        self.attention = Attention(config, layer, form, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, form.dtype, rngs=rngs)
        self.mlp = Mlp(config, form, rngs=rngs)

    def __call__(self, x, rope, step: ForwardInput, kv: KVPair, backends: Backends) -> tuple[Array, KVPair]:
        mixed, kv = self.attention(self.attention_norm(x), rope, step, kv, backends)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x), backends), kv


@partial(jax.jit, static_argnums=(0, 6))
def _run_layer(graphdef, params, x, rope, step: ForwardInput, kv: KVPair, backends: Backends) -> tuple[Array, KVPair]:
    """One layer as a function of its own: equal layers are then traced and lowered once, not thirty times."""
    return nnx.merge(graphdef, params)(x, rope, step, kv, backends)


class Llama(nnx.Module):
    """Embedding, layers, final norm and head. `backbone` and `logits` are compiled apart: see runner."""

    def __init__(self, config: ModelConfig, form: MatrixForm, *, rngs: nnx.Rngs):
        shape, axes = (config.vocab_size, config.hidden_size), ("vocab", "embed")
        tied = config.tie_word_embeddings
        # A table that is only looked up in stays in floats: that is no product, and its rows are read one by one.
        looked_up = form if tied else MatrixForm(dtype=form.dtype, quantization=None)
        self.embed_vd = matrix(rngs, shape, axes, outputs=1, form=looked_up)
        self.layers = nnx.List([Layer(config, i, form, rngs=rngs) for i in range(config.num_layers)])
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, form.dtype, rngs=rngs)
        self.head_vd = None if tied else matrix(rngs, shape, axes, outputs=1, form=form)
        self.config = config

    def backbone(
        self, step: ForwardInput, cache: tuple[KVPair, ...], backends: Backends
    ) -> tuple[Float[Array, "T D"], tuple[KVPair, ...]]:
        """Hidden states before the final norm, and the cache with this step's keys and values."""
        x = embed(self.embed_vd, step.tokens)
        rope = self._rope(step)
        written = []
        for layer, kv in zip(self.layers, cache, strict=True):
            graphdef, params = nnx.split(layer)
            x, kv = _run_layer(graphdef, params, x, rope, step, kv, backends)
            written.append(kv)
        return x, tuple(written)

    def final_states(self, hidden: Float[Array, "S D"]) -> Float[Array, "S D"]:
        """The backbone's hidden states after the final norm."""
        return self.final_norm(hidden)

    def logits(self, hidden: Float[Array, "S D"], backends: Backends) -> Float[Array, "S V"]:
        """Float32 logits of hidden states taken from the backbone."""
        head = self.embed_vd if self.head_vd is None else self.head_vd
        return linear(self.final_states(hidden), head, None, backends, outputs=1).astype(jnp.float32)

    def _rope(self, step: ForwardInput) -> tuple[Float[Array, "T h"], Float[Array, "T h"]]:
        rope, head_dim = self.config.rope, self.config.head_dim
        if rope.kind == "dynamic":
            frequencies, scale = dynamic_inverse_frequencies(rope, head_dim, step.rope_lens), 1.0
        else:
            static, scale = inverse_frequencies(rope, head_dim)
            frequencies = jnp.asarray(static)[None, :]
        angles = step.positions[:, None].astype(jnp.float32) * frequencies
        return jnp.cos(angles) * scale, jnp.sin(angles) * scale
