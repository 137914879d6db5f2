"""One model as a Hugging Face directory and as GGUF files: the same prompt ids, the same answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import jaxpaged
from tests.support.checkpoints import write_checkpoint
from tests.support.driving import answers, greedy, logprob_rows
from tests.support.engines import small_llm
from tests.support.gguf_files import write_gguf
from tests.support.tiny import tiny_config, tiny_tensors
from tests.support.vocabularies import family_tokenizer, vocabulary_metadata

Kind = gguf.GGMLQuantizationType
VOCAB = 1024
PROMPTS = [[5], [901, 17, 17, 340], list(range(100, 109)), list(range(700, 733, 2))]
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MODELS: dict[str, dict[str, Any]] = {
    "kv-heads-2": {"num_key_value_heads": 2},
    "kv-heads-4": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "qwen2": QWEN2,
}


def scores(model: Path, *, steps: int) -> tuple[list[list[int]], np.ndarray]:
    """Greedy ids of all prompts, and the log-probability of every id at every step [prompts, steps, VOCAB]."""
    llm = small_llm(model, skip_tokenizer_init=True, max_logprobs=VOCAB)
    found = answers(llm, PROMPTS, greedy(max_tokens=steps, logprobs=VOCAB, ignore_eos=True))
    rows = [[[row[token] for token in range(VOCAB)] for row in logprob_rows(completion)] for completion in found]
    return [completion.token_ids for completion in found], np.array(rows)


def both_forms(path: Path, kind: Kind, **config_overrides: Any) -> tuple[Path, Path]:
    """The model as a directory of safetensors and as a GGUF file."""
    config = tiny_config(**config_overrides)
    tensors = tiny_tensors(config, seed=3)
    directory = write_checkpoint(path / "hf", config, tensors, generation_eos=None, tokenizer=None, shards=1)
    file = write_gguf(path / "tiny.gguf", config, tensors, kind=kind, architecture=config["model_type"])
    return directory, file


@pytest.mark.parametrize("name", MODELS)
def test_an_f32_file_answers_as_the_directory(tmp_path: Path, name: str):
    """q and k rows of a llama file, and of no other kind, lie in another order: attention was noise, without an error.

    A file of a tied model has no output.weight, which was taken for damage.
    """
    directory, file = both_forms(tmp_path, Kind.F32, **MODELS[name])
    wanted_ids, wanted = scores(directory, steps=4)
    ids, got = scores(file, steps=4)
    assert ids == wanted_ids
    np.testing.assert_allclose(got, wanted, atol=1e-4)


@pytest.mark.parametrize(("kind", "least"), [(Kind.F16, 0.99999), (Kind.Q8_0, 0.999)])
def test_a_rounded_file_answers_nearly_as_the_directory(tmp_path: Path, kind: Kind, least: float):
    """Blocks of a quantised tensor were read in another order or with another scale."""
    directory, file = both_forms(tmp_path, kind)
    _, wanted = scores(directory, steps=1)
    _, got = scores(file, steps=1)
    for a, b in zip(wanted[:, 0], got[:, 0], strict=True):
        a, b = a - a.mean(), b - b.mean()  # as logits, whose common offset means nothing
        assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > least


TEXTS = [
    "hello world", " leading", "trailing ", "a  b   c", "the quick brown fox", "12345 1234 10,000", "3.14159",
    "naïve café", "Привет мир", "日本語 텍스트", "😀🍕", "it's they'll we'd", "def f(x): return x**2", "\n",
    "\n\n\ttab", "<|im_start|>user\nhello<|im_end|>", "a<tag>b", "inside", "HELLO World!", "?!...",
]  # fmt: skip


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("kind", ["gpt-2", "llama-bpe", "spm"])
def test_prompt_ids_are_those_of_the_directory(tmp_path: Path, kind: str, add_bos: bool):
    """The flag that asks for a begin token, and merges written in another form, were ignored: wrong prompt ids."""
    tokenizer = family_tokenizer(kind, add_bos=add_bos)
    config = tiny_config()
    tensors = tiny_tensors(config, seed=0)
    metadata = vocabulary_metadata(kind, tokenizer) | {"tokenizer.ggml.add_bos_token": add_bos}
    directory = write_checkpoint(tmp_path / "hf", config, tensors, generation_eos=None, tokenizer=tokenizer, shards=1)
    file = write_gguf(tmp_path / "tiny.gguf", config, tensors, metadata=metadata)
    found = [_prompt_ids(small_llm(path)) for path in (directory, file)]
    assert found[0] == found[1]
    assert found[1] == [tokenizer.encode(text).ids for text in TEXTS]
    assert all((ids[0] == tokenizer.token_to_id("<s>")) == add_bos for ids in found[1])


def _prompt_ids(llm: jaxpaged.LLM) -> list[list[int]]:
    outputs = llm.generate(TEXTS, greedy(max_tokens=1), use_tqdm=False)
    return [output.prompt_token_ids for output in outputs]
