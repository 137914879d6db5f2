"""The paged KV cache on the device: its arrays and how many blocks fit into memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.config import EngineConfig
from jaxpaged.models.config import ModelConfig

Device = Any  # a jax.Device, which is not a static type
KVCache = tuple[tuple[jax.Array, jax.Array], ...]  # per layer: keys and values, each [N blocks, K, B, H]

# On CPU memory is shared with everything else, so the cache takes this share of what is free, unless told otherwise.
CPU_FREE_SHARE = 0.1


def block_bytes(model: ModelConfig, block_size: int, dtype: jnp.dtype) -> int:
    """Bytes of one block over all layers: 2 · L · K · B · H · itemsize."""
    return 2 * model.num_layers * model.num_kv_heads * block_size * model.head_dim * jnp.dtype(dtype).itemsize


def cache_shape(model: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, int, int, int]:
    """Of one layer's keys, and of its values: [N, K, B, H]."""
    return num_blocks, model.num_kv_heads, block_size, model.head_dim


def zero_cache(model: ModelConfig, num_blocks: int, block_size: int, dtype: jnp.dtype, sharding) -> KVCache:
    """Zeros: an attention weight of 0 times uninitialised memory could be NaN."""
    shape = cache_shape(model, num_blocks, block_size)

    def zeros() -> jax.Array:
        return jnp.zeros(shape, dtype, device=sharding)

    return tuple((zeros(), zeros()) for _ in range(model.num_layers))


def count_blocks(
    config: EngineConfig,
    model: ModelConfig,
    dtype: jnp.dtype,
    device: Device,
    *,
    max_model_len: int,
    max_num_seqs: int,
    weight_bytes: int,
) -> int:
    """Blocks of the cache, the trash block included.

    In this order: num_gpu_blocks_override, kv_cache_memory_bytes, or the device's memory: on a GPU what
    gpu_memory_utilization leaves beside what is in use and the weights to come, weight_bytes; on CPU CPU_FREE_SHARE of
    the free memory in coarse steps. The latter two never exceed what max_num_seqs sequences of max_model_len tokens
    could use.

    Raises: ValueError when not even one block fits.
    """
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override
    size = block_bytes(model, config.block_size, dtype)
    budget = config.kv_cache_memory_bytes
    if budget is None:
        budget = free_memory(device, config.gpu_memory_utilization, weight_bytes)
    blocks = budget // size
    if blocks < 2:
        raise ValueError(
            f"KV cache: wanted memory for at least 2 blocks of {size} bytes, got {budget} bytes; raise "
            f"kv_cache_memory_bytes or gpu_memory_utilization, or lower block_size"
        )
    useful = max_num_seqs * -(-max_model_len // config.block_size) + 1
    return min(blocks, useful)


def free_memory(device: Device, utilization: float, weight_bytes: int) -> int:
    """Bytes the cache may take on this device; the weights, weight_bytes of it, are not loaded yet."""
    if device.platform == "cpu":
        return _rounded(int(CPU_FREE_SHARE * _free_host_memory()))
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ValueError(
            f"device {device} does not report its memory; give kv_cache_memory_bytes or num_gpu_blocks_override"
        )
    return int(stats["bytes_limit"] * utilization) - stats["bytes_in_use"] - weight_bytes


def _rounded(size: int) -> int:
    """Down to the two leading binary digits: 1, 1.5, 2, 3, 4, 6, … times a power of two.

    The cache's size is part of every compiled program's shape: a size that followed each change of free memory would
    find no program on disk, and compile for minutes at every start.
    """
    shift = max(0, size.bit_length() - 2)
    return size >> shift << shift


def _free_host_memory() -> int:
    """MemAvailable of Linux, cut to the control group's limit; elsewhere 8 GiB, a guess that works."""
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if not meminfo.exists():
        return 8 << 30
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        free = min(free, int(text) - used)
    return free
