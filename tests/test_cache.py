"""How many blocks the KV cache gets from the device's memory."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxpaged import EngineConfig, cache
from jaxpaged.models.config import ModelConfig
from tests.support.tiny import tiny_config

MODEL = ModelConfig.from_hf(tiny_config(), None)
BLOCK = cache.block_bytes(MODEL, 16, jnp.dtype("float32"))
CPU = SimpleNamespace(platform="cpu")
GIB = 1 << 30


def blocks(
    device: SimpleNamespace = CPU, *, max_num_seqs: int = 10**6, weight_bytes: int = 0, **options: object
) -> int:
    config = EngineConfig.create("model", **options)
    return cache.count_blocks(
        config,
        MODEL,
        jnp.dtype("float32"),
        device,
        max_model_len=512,
        max_num_seqs=max_num_seqs,
        weight_bytes=weight_bytes,
    )


@pytest.mark.parametrize(
    ("free", "budget"), [(10 * GIB, 1 * GIB), (15.5 * GIB, 1.5 * GIB), (19 * GIB, 1.5 * GIB), (20.5 * GIB, 2 * GIB)]
)
def test_on_cpu_a_tenth_of_free_memory_in_coarse_steps(
    monkeypatch: pytest.MonkeyPatch, free: float, budget: float
) -> None:
    """Free memory is never the same twice: every start had another cache, and so compiled all programs anew."""
    monkeypatch.setattr(cache, "_free_host_memory", lambda: int(free) + 1000)
    assert blocks() == budget // BLOCK


def test_never_more_than_the_sequences_could_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_free_host_memory", lambda: 10 * GIB)
    assert blocks(max_num_seqs=2) == 2 * 512 // 16 + 1
    assert blocks(max_num_seqs=2, kv_cache_memory_bytes=GIB) == 2 * 512 // 16 + 1
    assert blocks(max_num_seqs=2, num_gpu_blocks_override=1000) == 1000


def test_what_is_said_goes_before_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_free_host_memory", lambda: 10 * GIB)
    assert blocks(kv_cache_memory_bytes=7 * BLOCK + 1) == 7
    assert blocks(kv_cache_memory_bytes=7 * BLOCK, num_gpu_blocks_override=5) == 5


def test_too_little_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_free_host_memory", lambda: 10 * BLOCK)
    with pytest.raises(ValueError, match=f"at least 2 blocks of {BLOCK} bytes, got {BLOCK} bytes"):
        blocks()


def test_a_gpu_counts_what_is_in_use_and_what_is_to_come() -> None:
    """The cache was sized before the weights were loaded, and took the memory that they needed."""
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 100 * BLOCK, "bytes_in_use": 20 * BLOCK})
    assert blocks(gpu, gpu_memory_utilization=0.5) == 30
    assert blocks(gpu, gpu_memory_utilization=0.5, weight_bytes=4 * BLOCK) == 26
    silent = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    with pytest.raises(ValueError, match="does not report its memory"):
        blocks(silent)
