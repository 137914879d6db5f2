"""int8 weights in the engine: rounding, biases, fused matrices, memory, meshes, what is refused."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from jaxpaged import LLM, SamplingParams
from jaxpaged.models.matrices import quantize_matrix
from tests.support.checkpoints import write_checkpoint
from tests.support.tiny import tiny_checkpoint, tiny_config, tiny_tensors

PROMPTS = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 9, 20)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5)
BIASED = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2")


def load(path: Path, **options) -> LLM:
    return LLM(
        str(path), skip_tokenizer_init=True, max_model_len=64, block_size=4, warmup=False, use_tqdm_on_load=False,
        max_num_seqs=4, max_num_batched_tokens=32, **options,
    )  # fmt: skip


def weights(llm: LLM) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_flatten_with_path(llm.model_state()[1])[0]
    named = ((jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves)
    return {name.removesuffix(".value"): np.asarray(leaf) for name, leaf in named}


def hidden_states(llm: LLM) -> np.ndarray:
    """Of each prompt's last token, after the final norm."""
    return np.stack([output.outputs.embedding for output in llm.embed(PROMPTS, normalize=False, use_tqdm=False)])


def likeness(left: np.ndarray, right: np.ndarray) -> float:
    """The least cosine of two rows."""
    norms = np.linalg.norm(left, axis=-1) * np.linalg.norm(right, axis=-1)
    return float(((left * right).sum(-1) / norms).min())


def test_rows_are_rounded_with_scales_of_their_own():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((3, 2, 40)).astype(np.float32)
    w[0] *= 0.01  # one part of a fused matrix, a hundred times smaller
    w[1, 0] = 0
    w[2, 1, 7] = 1000  # an outlier
    values, scales = quantize_matrix(w, 2)
    assert values.dtype == np.int8
    assert values.shape == w.shape
    assert scales.shape == (3, 2)
    off = np.abs(values * scales[..., None] - w)
    assert (off <= 0.5001 * scales[..., None]).all()
    assert (np.abs(values).max(-1) == [[127, 127], [0, 127], [127, 127]]).all()
    one_output_axis = quantize_matrix(w, 1)[1]
    np.testing.assert_allclose(one_output_axis, np.abs(w).max((1, 2)) / 127, rtol=1e-6)


@pytest.mark.parametrize("scheme", ["int8", "int8_w8a8"])
def test_biases_and_small_parts_are_kept(tmp_path: Path, scheme: str):
    """Large biases of q, k and v, a gate a hundred times smaller than up: one scale for both would lose the gate."""
    config = tiny_config(**BIASED)
    tensors = tiny_tensors(config, seed=3)
    for name, tensor in tensors.items():
        if name.endswith("bias"):
            tensor *= 20
        if "gate_proj" in name:
            tensor *= 0.01
    write_checkpoint(tmp_path, config, tensors, generation_eos=None, tokenizer=None, shards=1)
    exact, rounded = load(tmp_path), load(tmp_path, quantization=scheme)
    assert likeness(hidden_states(exact), hidden_states(rounded)) > 0.999
    found = weights(rounded)
    biases = [name for name in found if "bias" in name]
    assert biases
    for name in (*biases, "embed_vd", "final_norm.scale_d"):
        np.testing.assert_array_equal(found[name], weights(exact)[name])
    assert found["layers.0.mlp.gate_up_2fd.values"].dtype == np.int8
    assert found["head_vd.values"].dtype == np.int8


def test_a_tied_table_is_the_head(tmp_path: Path):
    path = tiny_checkpoint(tmp_path, tie_word_embeddings=True)
    exact, rounded = load(path), load(path, quantization="int8")
    assert weights(rounded)["embed_vd.values"].dtype == np.int8
    sizes = [sum(array.nbytes for array in weights(llm).values()) for llm in (exact, rounded)]
    assert sizes[1] < 0.32 * sizes[0]  # a quarter, and scales, which weigh more in rows of 64
    assert likeness(hidden_states(exact), hidden_states(rounded)) > 0.998


@pytest.mark.parametrize("scheme", ["int8", "int8_w8a8"])
def test_devices_hold_the_same_integers(tmp_path: Path, scheme: str):
    """Scales of rows that are cut over devices were once each device's own."""
    path = tiny_checkpoint(tmp_path, num_key_value_heads=4, **BIASED)
    alone = load(path, quantization=scheme, matmul_backend="xla")
    wanted = [output.outputs[0] for output in alone.generate(PROMPTS, GREEDY, use_tqdm=False)]
    for size in (2, 4):
        split = load(path, quantization=scheme, tensor_parallel_size=size)
        for name, array in weights(split).items():
            np.testing.assert_array_equal(array, weights(alone)[name])
        got = [output.outputs[0] for output in split.generate(PROMPTS, GREEDY, use_tqdm=False)]
        assert [output.token_ids for output in got] == [output.token_ids for output in wanted]
        for one, other in zip(got, wanted, strict=True):
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path):
    config = tiny_config()
    tensors = tiny_tensors(config, seed=0)
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] = np.inf
    write_checkpoint(tmp_path, config, tensors, generation_eos=None, tokenizer=None, shards=1)
    with pytest.raises(ValueError, match=r"model.layers.1.mlp.down_proj.weight: wanted finite weights"):
        load(tmp_path, quantization="int8")


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match=r"quantization: wanted None, 'int8' .* got 'fp4'"):
        LLM("nowhere", quantization="fp4")
