"""From an EngineConfig to a loaded model on its devices: what happens once, at start."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxpaged.blueprint import Blueprint, Limits, Parameter, draw_blueprint
from jaxpaged.config import EngineConfig
from jaxpaged.demo import resolve_model
from jaxpaged.models.matrices import quantize_matrix
from jaxpaged.models.registry import family_of
from jaxpaged.models.weights import Checkpoint, Slot, ignorable_tensors, load_weights, open_checkpoint
from jaxpaged.models.weights.hub import fetch_snapshot, is_hub_id
from jaxpaged.runner import ModelRunner
from jaxpaged.scheduler import Scheduler
from jaxpaged.sharding.mesh import make_mesh
from jaxpaged.tokenizer import Tokenizer
from jaxpaged.warm_start import WarmStart, processor_name, use_compilation_cache


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A started device side and what the host needs to know of it."""

    checkpoint: Checkpoint
    blueprint: Blueprint
    runner: ModelRunner
    load_seconds: float
    compile_seconds: float


def load(config: EngineConfig) -> Loaded:
    """Open the checkpoint, size the cache, compile every program while the weights load.

    Raises: ValueError for a checkpoint or option that does not work.
    """
    checkpoint = open_checkpoint(
        resolve_model(config.model), revision=config.revision, token=config.hf_token, download_dir=config.download_dir
    )
    cache = use_compilation_cache(config.compilation_cache_dir)
    mesh = make_mesh(config.tensor_parallel_size, jax.devices())
    model = checkpoint.config
    plan = draw_blueprint(config, model, mesh.devices.flat[0], mesh)
    runner = ModelRunner(model, plan.code, plan.spec, mesh, plan.abstract_params)
    warm = WarmStart(cache, processor_name(mesh.devices.flat[0]), model, plan.code, plan.spec, mesh)
    if config.warmup and not warm.ready:
        runner.programs.start(os.cpu_count() or 1)
    begun = time.perf_counter()
    if config.load_format == "dummy":
        runner.load(_random_weights(plan, config.seed))
    else:
        runner.load(_checkpoint_weights(config, plan, checkpoint))
    checkpoint.source.close()
    loaded = time.perf_counter()
    if config.warmup and warm.ready:
        runner.programs.expect_on_disk()
    elif config.warmup:
        with _ProgressBar(config, "compiling programs") as progress:
            runner.programs.finish(progress)
        warm.remember()
    return Loaded(
        checkpoint=checkpoint,
        blueprint=plan,
        runner=runner,
        load_seconds=loaded - begun,
        compile_seconds=time.perf_counter() - loaded,
    )


def make_scheduler(config: EngineConfig, limits: Limits) -> Scheduler:
    """The scheduler for an engine of these sizes."""
    return Scheduler(
        num_blocks=limits.num_blocks,
        block_size=config.block_size,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
        max_num_read=limits.max_num_read,
    )


def open_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer that the config names, by default the checkpoint's own; None where it wants none.

    Raises: ValueError where there is none, or none that can be used.
    """
    name = config.tokenizer
    if config.skip_tokenizer_init:
        return None
    if name is None:
        return checkpoint.tokenizer()
    if name.endswith(".gguf"):
        return Tokenizer.from_gguf(name)
    if Path(name).is_dir() or not is_hub_id(name):
        return Tokenizer.from_directory(name)
    return Tokenizer.from_directory(
        fetch_snapshot(
            name,
            revision=config.tokenizer_revision,
            token=config.hf_token,
            download_dir=config.download_dir,
            weights=False,
        )
    )


def _checkpoint_weights(config: EngineConfig, plan: Blueprint, checkpoint: Checkpoint) -> tuple[jax.Array, ...]:
    model = checkpoint.config
    parameters = {parameter.path: parameter for parameter in plan.parameters}

    def place(slot: Slot, host: np.ndarray) -> dict[tuple[Any, ...], jax.Array]:
        parts = {slot.path: host}
        values = parameters.get((*slot.path, "values"))
        if values is not None and values.outputs is not None:
            integers, scales = _quantize(slot, host, values.outputs)
            parts = {(*slot.path, "values"): integers, (*slot.path, "scales"): scales}
        return {
            path: jax.device_put(_cast(slot, part, parameters[path].dtype), parameters[path].sharding)
            for path, part in parts.items()
        }

    with _ProgressBar(config, "loading weights") as progress:
        slots = family_of(model).slots(model)
        arrays = load_weights(slots, checkpoint.source, place, ignorable_tensors(model), progress)
    return tuple(arrays[parameter.path] for parameter in plan.parameters)


def _quantize(slot: Slot, host: np.ndarray, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    try:
        return quantize_matrix(host, outputs)
    except ValueError as error:
        raise ValueError(f"{', '.join(slot.names)}: {error}; load the model without quantization") from None


def _cast(slot: Slot, host: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Infinities of the checkpoint stay; a number that would become one is an error."""
    try:
        with np.errstate(over="raise"):
            return host.astype(dtype, copy=False)
    except FloatingPointError:
        largest = np.abs(host[np.isfinite(host)]).max()
        raise ValueError(
            f"{', '.join(slot.names)}: wanted values that {dtype.name} can hold, got {largest:.4g}; "
            "load the model with dtype='bfloat16' or 'float32'"
        ) from None


def _random_weights(plan: Blueprint, seed: int) -> tuple[jax.Array, ...]:
    """Normal matrices of the usual size, vectors of ones, each made where it stays: for measurements."""

    def make(key: jax.Array, parameter: Parameter) -> jax.Array:
        shape, dtype = parameter.shape, parameter.dtype
        if parameter.outputs is not None:
            return jax.random.randint(key, shape, -127, 128, jnp.int8)
        if parameter.path[-1] == "scales":
            return jnp.full(shape, 0.02 / 73, dtype)  # 73: the standard deviation of those integers
        return jnp.ones(shape, dtype) if len(shape) == 1 else 0.02 * jax.random.normal(key, shape, dtype)

    keys = jax.random.split(jax.random.key(seed), len(plan.parameters))
    return tuple(
        jax.jit(partial(make, parameter=parameter), out_shardings=parameter.sharding)(key)
        for key, parameter in zip(keys, plan.parameters, strict=True)
    )


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
