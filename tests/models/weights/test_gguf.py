"""GGUF checkpoints give the same names, layouts, values and config as the Hugging Face checkpoint they came from."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Kind

from jaxpaged.gguf_file import read_gguf
from jaxpaged.models.weights import open_checkpoint
from jaxpaged.models.weights.dequantise import KINDS, dequantise
from jaxpaged.models.weights.gguf import GGUFSource
from tests.support.checkpoints import write_checkpoint
from tests.support.gguf_files import add_metadata, finish, write_gguf
from tests.support.gguf_models import model_config_of, opened_gguf, tiny_model


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a.ravel() @ b.ravel() / (np.linalg.norm(a) * np.linalg.norm(b)))


@pytest.mark.parametrize(("architecture", "tied"), [("llama", False), ("llama", True), ("qwen2", False)])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_f32_file_equals_the_safetensors_checkpoint(tmp_path: Path, kv_heads: int, architecture: str, tied: bool):
    """q and k rows of the llama kind (and only of it) are stored in another order: read as they lie, the file loads
    cleanly and attention is noise. Files of tied models have no output.weight, which a loader took for damage."""
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
    config, tensors = tiny_model(
        num_key_value_heads=kv_heads,
        architectures=[names[architecture]],
        model_type=architecture,
        tie_word_embeddings=tied,
    )
    directory = write_checkpoint(
        tmp_path / "hf", config, tensors, generation_eos=None, tokenizer=None, shards=1, tokenizer_options=None
    )
    write_gguf(tmp_path / "tiny.gguf", config, tensors, architecture=architecture)
    options = {"revision": None, "token": None, "download_dir": None}
    wanted = open_checkpoint(str(directory), **options)
    got = open_checkpoint(str(tmp_path / "tiny.gguf"), **options)
    assert got.config == wanted.config
    assert got.config.tie_word_embeddings == tied
    assert set(got.source.names()) == set(wanted.source.names())
    for name in wanted.source.names():
        assert got.source.shape(name) == wanted.source.shape(name)
        value = got.source.read(name)
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, wanted.source.read(name), err_msg=name)
    got.source.close()
    wanted.source.close()


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0])
def test_rounded_files_are_close_to_the_original(tmp_path: Path, kv_heads: int, kind: Kind):
    config, tensors = tiny_model(num_key_value_heads=kv_heads)
    source = opened_gguf(tmp_path, config, tensors, kind=kind)
    for name, tensor in tensors.items():
        value = source.read(name)
        if kind == Kind.F16:
            np.testing.assert_array_equal(value, tensor.astype(np.float16) if tensor.ndim > 1 else tensor)
        assert _cosine(value, tensor) > 0.999, name
    assert source.config_dict()["dtype"] == {Kind.F16: "float16", Kind.BF16: "bfloat16"}.get(kind, "float32")


def test_biases_of_q_and_k_are_reordered_like_their_weights(tmp_path: Path):
    config, tensors = tiny_model(attention_bias=True, mlp_bias=True)
    source = opened_gguf(tmp_path, config, tensors)
    assert model_config_of(source).attention_bias
    assert model_config_of(source).attention_out_bias
    assert model_config_of(source).mlp_bias
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(source.read(name), tensor, err_msg=name)


def test_llama_file_with_biases_on_q_k_v_only(tmp_path: Path):
    """Hugging Face's Llama has all four attention biases or none; such a file is a Qwen2 in Llama's row order."""
    config, tensors = tiny_model(attention_bias=True)
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("o_proj.bias")}
    source = opened_gguf(tmp_path, config, tensors)
    assert model_config_of(source).attention_bias
    assert not model_config_of(source).attention_out_bias
    np.testing.assert_array_equal(
        source.read("model.layers.1.self_attn.k_proj.bias"), tensors["model.layers.1.self_attn.k_proj.bias"]
    )


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.F16, Kind.BF16])
def test_quantised_weights_equal_the_reference_expansion(tmp_path: Path, kind: Kind):
    config, tensors = tiny_model()
    source = opened_gguf(tmp_path, config, tensors, kind=kind)
    for name in ("lm_head.weight", "model.layers.0.mlp.down_proj.weight", "model.layers.1.self_attn.q_proj.weight"):
        wanted = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], kind), kind)
        np.testing.assert_array_equal(source.read(name), wanted, err_msg=name)


@pytest.mark.parametrize("name", [name for name in KINDS.values() if name != "F32"])
def test_every_storage_type_equals_the_reference_expansion(name: str):
    """Random bytes of 300 rows, so that several pieces and a short last one occur."""
    kind, shape = Kind[name], (300, 1024)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(1)
    data = rng.integers(0, 60, (shape[0], shape[1] // elements * size), dtype=np.uint8)  # small: scales stay finite
    np.testing.assert_array_equal(
        dequantise(data.reshape(-1), kind.value, shape), gguf.quants.dequantize(data, kind), strict=True
    )


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K])
def test_k_quantised_q_projection_is_put_back_in_order(tmp_path: Path, kind: Kind):
    """Rows are reordered before they are expanded; the two must commute."""
    config, tensors = tiny_model(hidden_size=256, num_hidden_layers=1)
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    data = np.random.default_rng(2).integers(0, 60, (256, size), dtype=np.uint8)
    source = opened_gguf(tmp_path, config, tensors, raw={"blk.0.attn_q.weight": (data, kind)})
    stored = gguf.quants.dequantize(data, kind).reshape(4, 32, 2, 256)
    wanted = np.concatenate([stored[:, :, 0], stored[:, :, 1]], axis=1).reshape(256, 256)
    np.testing.assert_array_equal(source.read("model.layers.0.self_attn.q_proj.weight"), wanted)


def test_unsupported_storage_type_is_named(tmp_path: Path):
    size = gguf.GGML_QUANT_SIZES[Kind.TQ2_0][1]
    raw = {"blk.9.ffn_up.weight": (np.zeros((4, size), np.uint8), Kind.TQ2_0)}
    with pytest.raises(ValueError, match=r"blk.9.ffn_up.weight: storage type 35 is not supported.*Q4_K"):
        opened_gguf(tmp_path, *tiny_model(), raw=raw)


def test_tensors_without_a_counterpart_keep_their_name(tmp_path: Path):
    """So that loading can warn of them by the name that the file has."""
    source = opened_gguf(tmp_path, *tiny_model(), raw={"blk.0.attn_rot.weight": (np.zeros(4, np.float32), Kind.F32)})
    assert "blk.0.attn_rot.weight" in source.names()


def test_unknown_names_and_closed_files_are_refused(tmp_path: Path):
    config, tensors = tiny_model()
    source = opened_gguf(tmp_path, config, tensors)
    before = source.read("model.norm.weight")
    with pytest.raises(ValueError, match="has no tensor model.nrom.weight"):
        source.read("model.nrom.weight")
    source.close()
    with pytest.raises(ValueError, match="was closed"):
        source.read("model.norm.weight")
    np.testing.assert_array_equal(before, tensors["model.norm.weight"])


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path):
    """A download that broke off must not be read past its end or give zeros."""
    config, tensors = tiny_model(num_hidden_layers=1, vocab_size=64)
    whole = write_gguf(tmp_path / "whole.gguf", config, tensors, kind=Kind.Q8_0).read_bytes()
    broken = tmp_path / "broken.gguf"
    lengths = [*range(0, 400, 7), *range(400, len(whole) - 32, 997), len(whole) - 33]
    for length in lengths:
        broken.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="fetch it again|is not a GGUF file that can be read"):
            GGUFSource(broken)


def test_damaged_headers_give_a_value_error_or_a_readable_file(tmp_path: Path):
    config, tensors = tiny_model(num_hidden_layers=1, vocab_size=64)
    path = write_gguf(tmp_path / "whole.gguf", config, tensors)
    whole = path.read_bytes()
    header = min(entry.offset for entry in read_gguf(path).tensors.values())
    rng = np.random.default_rng(3)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.integers(4, header)] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            source = GGUFSource(path)
            for name in source.names():
                source.read(name)
        except ValueError:
            refused += 1
    assert refused > 30


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"PK\x03\x04 not a model", "first four bytes"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (b"", "is empty"),
    ],
)
def test_other_files_are_refused_with_the_reason(tmp_path: Path, start: bytes, message: str):
    path = tmp_path / "model.gguf"
    path.write_bytes(start)
    with pytest.raises(ValueError, match=message):
        GGUFSource(path)


def test_metadata_of_every_type_is_read(tmp_path: Path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {"a": True, "b": 7, "c": 0.5, "d": "text — ü", "e": ["x", "", "ü"], "f": [1, 2], "g": [["a", "b"]]}
    add_metadata(writer, values)
    writer.add_int64("h", -(2**40))
    writer.add_array("i", [0.25, -1.5])
    metadata = read_gguf(finish(writer)).metadata
    assert {key: metadata[key] for key in values} == values
    assert (metadata["h"], metadata["i"]) == (-(2**40), [0.25, -1.5])
