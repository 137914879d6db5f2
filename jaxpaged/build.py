"""From an EngineConfig to a loaded model on its devices: what happens once, at start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tqdm import tqdm

from jaxpaged.batch import BatchShape
from jaxpaged.cache import Device, count_blocks
from jaxpaged.config import EngineConfig
from jaxpaged.demo import resolve_model
from jaxpaged.models.registry import family_of
from jaxpaged.models.weights import Checkpoint, ignorable_tensors, load_weights, open_checkpoint
from jaxpaged.pallas_kernels import TileConfig, implementations
from jaxpaged.programs import ModelCode
from jaxpaged.recipes import RunnerSpec
from jaxpaged.runner import ModelRunner
from jaxpaged.sharding.mesh import make_mesh
from jaxpaged.sharding.rules import TENSOR_PARALLEL, sharding_of
from jaxpaged.warm_start import WarmStart, use_compilation_cache

CPU_TILES = TileConfig(decode_lanes=32, decode_kv=64, prefill_queries=64, prefill_kv=128)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """EngineConfig's open questions, answered: sizes in tokens or sequences."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_blocks: int  # the trash block included


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A started device side and what the host needs to know of it."""

    checkpoint: Checkpoint
    limits: Limits
    runner: ModelRunner
    load_seconds: float
    compile_seconds: float


def load(config: EngineConfig) -> Loaded:
    """Open the checkpoint, size the cache, compile every program while the weights load.

    Raises: ValueError for a checkpoint or option that does not work.
    """
    if config.attention_backend not in ("auto", *implementations()):
        raise ValueError(
            f"attention_backend: wanted auto or one of {implementations()}, got {config.attention_backend!r}"
        )
    checkpoint = open_checkpoint(
        resolve_model(config.model), revision=config.revision, token=config.hf_token, download_dir=config.download_dir
    )
    cache = use_compilation_cache(config.compilation_cache_dir)
    mesh = make_mesh(config.tensor_parallel_size, jax.devices())
    device = mesh.devices.flat[0]
    model = checkpoint.config
    dtype = resolve_dtype(config.dtype, model.dtype, device.platform)
    cache_dtype = dtype if config.kv_cache_dtype == "auto" else jnp.dtype(config.kv_cache_dtype)
    limits = resolve_limits(config, checkpoint, cache_dtype, device)
    family = family_of(model)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: family.module(model, dtype, rngs=nnx.Rngs(0))))
    paths, shapes, shardings = _parameters(state, mesh)
    abstract = tuple(
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, sharding in zip(shapes, shardings, strict=True)
    )
    code = ModelCode(
        graphdef=graphdef, params_tree=jax.tree.structure(state), attention_backend=config.attention_backend
    )
    spec = RunnerSpec(
        num_blocks=limits.num_blocks,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_logprobs=min(config.max_logprobs, model.vocab_size),
        cache_dtype=cache_dtype,
        batch=BatchShape(
            block_size=config.block_size,
            max_num_seqs=limits.max_num_seqs,
            table_width=_table_width(limits.max_model_len, config.block_size),
            tiles=CPU_TILES,
        ),
    )
    runner = ModelRunner(model, code, spec, mesh, abstract)
    warm = WarmStart(cache, model, code, spec, mesh)
    if config.warmup and not warm.ready:
        runner.programs.start(os.cpu_count() or 1, smallest_first=False)
    begun = time.perf_counter()
    by_path = dict(zip(paths, shardings, strict=True))
    with _ProgressBar(config, "loading weights") as progress:
        arrays = load_weights(
            family.slots(model),
            checkpoint.source,
            lambda slot, host: jax.device_put(host.astype(dtype, copy=False), by_path[slot.path]),
            ignorable_tensors(model),
            progress,
        )
    checkpoint.source.close()
    runner.load(tuple(arrays[path] for path in paths))
    loaded = time.perf_counter()
    if config.warmup and warm.ready:
        runner.programs.start(1, smallest_first=True)  # read from the cache while the first requests run
    elif config.warmup:
        with _ProgressBar(config, "compiling programs") as progress:
            runner.programs.finish(progress)
        warm.remember()
    return Loaded(
        checkpoint=checkpoint,
        limits=limits,
        runner=runner,
        load_seconds=loaded - begun,
        compile_seconds=time.perf_counter() - loaded,
    )


def resolve_dtype(wanted: str, checkpoint: str, platform: str) -> Any:
    """ "auto": float32 on CPU, where nothing else is fast; elsewhere the checkpoint's, float32 as bfloat16."""
    if wanted != "auto":
        return jnp.dtype(wanted)
    if platform == "cpu":
        return jnp.dtype(jnp.float32)
    return jnp.dtype(checkpoint if checkpoint in ("bfloat16", "float16") else "bfloat16")


def resolve_limits(config: EngineConfig, checkpoint: Checkpoint, cache_dtype: Any, device: Device) -> Limits:
    """Fill in what the config leaves to the model and the device.

    Without max_model_len the model's own limit counts, cut to what the cache holds. A given one may be more than the
    cache holds: the scheduler refuses prompts that do not fit. Raises: ValueError when it is beyond the model's.
    """
    on_cpu = device.platform == "cpu"
    longest = checkpoint.config.context_length
    wanted = config.max_model_len
    if wanted is not None and wanted > longest:
        raise ValueError(f"max_model_len: wanted at most the model's {longest}, got {wanted}")
    max_model_len = wanted or longest
    max_num_seqs = config.max_num_seqs or (64 if on_cpu else 256)
    num_blocks = count_blocks(
        config, checkpoint.config, cache_dtype, device, max_model_len=max_model_len, max_num_seqs=max_num_seqs
    )
    room = (num_blocks - 1) * config.block_size
    if wanted is None:
        max_model_len = min(max_model_len, room)
    budget = config.max_num_batched_tokens or (512 if on_cpu else 2048)
    return Limits(
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, num_blocks=num_blocks
    )


def _table_width(max_model_len: int, block_size: int) -> int:
    """Blocks of the longest sequence, rounded up to whole inner iterations of attention."""
    blocks = -(-max_model_len // block_size)
    multiple = max(1, CPU_TILES.decode_kv // block_size, CPU_TILES.prefill_kv // block_size)
    return -(-blocks // multiple) * multiple


def _parameters(state: Any, mesh: jax.sharding.Mesh) -> tuple[list, list, list]:
    """Paths, shapes and shardings of the parameters, in the order of the flattened state."""
    paths, shapes, shardings = [], [], []
    for path, leaf in nnx.to_flat_state(state):
        paths.append(tuple(path))
        shapes.append(leaf.shape)
        shardings.append(sharding_of(leaf.axes, leaf.shape, TENSOR_PARALLEL, mesh))
    return paths, shapes, shardings


class _ProgressBar:
    """A progress bar as a callback progress(done, total); silent where the config says so."""

    def __init__(self, config: EngineConfig, what: str) -> None:
        self._bar = tqdm(desc=what, disable=not config.use_tqdm_on_load, leave=False)

    def __enter__(self) -> Callable[[int, int], None]:
        return self._show

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def _show(self, done: int, total: int) -> None:
        self._bar.total = total
        self._bar.update(done - self._bar.n)
