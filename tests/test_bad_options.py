"""Bad options and unknown keywords: errors that name them, before anything is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxpaged
from jaxpaged import LLM, EngineConfig, SamplingParams
from tests.support.engines import small_llm
from tests.support.tiny import tiny_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("bad-options") / "tiny")


def test_unknown_keywords_name_the_nearest(path: Path) -> None:
    """A dropped keyword is a setting that silently does not hold."""
    for attempt in (
        lambda: LLM(str(path), max_model_length=5),
        lambda: jaxpaged.generate(str(path), [1], max_model_length=5),
        lambda: EngineConfig.create("model", max_model_length=5),
    ):
        with pytest.raises(TypeError, match="unknown keyword 'max_model_length'.*'max_model_len'"):
            attempt()
    with pytest.raises(TypeError, match="unknown keyword 'topk'.*'top_k'"):
        SamplingParams(topk=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'foo'"):
        EngineConfig(model="model", foo=5)  # type: ignore[call-arg]


BAD_OPTIONS: list[dict[str, Any]] = [
    {"tokenizer": 5},
    {"tokenizer": ""},
    {"tokenizer_revision": ""},
    {"skip_tokenizer_init": "yes"},
    {"dtype": "float64"},
    {"dtype": np.float32},
    {"kv_cache_dtype": "int3"},
    {"load_format": "pickle"},
    {"seed": -1},
    {"seed": None},
    {"seed": 1.5},
    {"max_model_len": 0},
    {"max_model_len": 1},
    {"max_model_len": "32"},
    {"max_model_len": 513},
    {"block_size": 0},
    {"block_size": 12},
    {"block_size": None},
    {"block_size": True},
    {"gpu_memory_utilization": 0},
    {"gpu_memory_utilization": 1.1},
    {"gpu_memory_utilization": "0.9"},
    {"gpu_memory_utilization": float("nan")},
    {"kv_cache_memory_bytes": -1},
    {"num_gpu_blocks_override": 1},
    {"enable_prefix_caching": 1},
    {"max_num_seqs": 0},
    {"max_num_batched_tokens": 2.0},
    {"scheduling_policy": "lifo"},
    {"async_scheduling": None},
    {"max_logprobs": -1},
    {"tensor_parallel_size": 0},
    {"tensor_parallel_size": 9},
    {"tensor_parallel_size": 3},
    {"pipeline_parallel_size": 2},
    {"quantization": "int5"},
    {"attention_backend": "bogus"},
    {"matmul_backend": "bogus"},
    {"warmup": 0},
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_bad_options(path: Path, options: dict[str, Any]) -> None:
    """The error names the option, by its name or by what it does not divide."""
    (name,) = options
    with pytest.raises(ValueError, match=name):
        small_llm(path, **options)


@pytest.mark.parametrize(
    ("model", "match"),
    [(5, "model"), ("", "model"), (None, "model"), ("/no/such/model", "/no/such/model"), ("no such model", "no such")],
)
def test_bad_models(model: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LLM(model)
    with pytest.raises(ValueError, match=match):
        jaxpaged.generate(model, "hi")
