"""The exported Hugging Face directory is the GGUF's checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType as Kind

from jaxpaged.models.weights import open_checkpoint
from scripts.export_hf import export
from tests.support.gguf_files import write_gguf
from tests.support.tiny import tiny_config, tiny_tensors

_TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


def test_exported_directory_opens_as_the_same_checkpoint(tmp_path: Path):
    config = tiny_config(tie_word_embeddings=True)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>", "</s>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 3,
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": _TEMPLATE,
    }
    path = write_gguf(tmp_path / "m.gguf", config, tiny_tensors(config, seed=0), kind=Kind.Q8_0, metadata=metadata)
    export(path, tmp_path / "hf")
    options = {"revision": None, "token": None, "download_dir": None}
    wanted, got = open_checkpoint(str(path), **options), open_checkpoint(str(tmp_path / "hf"), **options)
    assert got.config == wanted.config
    assert got.generation_config == wanted.generation_config
    assert set(got.source.names()) == set(wanted.source.names())
    for name in wanted.source.names():
        np.testing.assert_array_equal(got.source.read(name), wanted.source.read(name))
    tokenizers = wanted.tokenizer(), got.tokenizer()
    assert [tokenizer.encode("aba<s>", True) for tokenizer in tokenizers] == [[3, 2, 0, 3]] * 2
    chats = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": "ab"}],
            add_generation_prompt=True,
            continue_final_message=False,
            chat_template=None,
            tools=None,
        )
        for tokenizer in tokenizers
    ]
    assert chats == ["ab</s>", "ab</s>"]
    got.source.close()
    wanted.source.close()
