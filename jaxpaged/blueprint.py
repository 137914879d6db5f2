"""What an engine's programs are made from, without weights or devices: code, sizes, abstract parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxpaged.batch import BatchShape
from jaxpaged.cache import Device, count_blocks
from jaxpaged.config import EngineConfig
from jaxpaged.models.config import ModelConfig
from jaxpaged.models.forward import Backends
from jaxpaged.models.matrices import MatrixForm
from jaxpaged.models.registry import family_of
from jaxpaged.pallas_kernels import (
    TileConfig,
    WorkConfig,
    dense_implementations,
    gpu_work_config,
    hopper_work_config,
    implementations,
    target_of,
)
from jaxpaged.programs import ModelCode
from jaxpaged.recipes import Recipes, RunnerSpec
from jaxpaged.sharding.mesh import MODEL_AXIS
from jaxpaged.sharding.rules import TENSOR_PARALLEL, sharding_of

CPU_TILES = TileConfig(decode_lanes=32, decode_kv=64, prefill_queries=64, prefill_kv=128)
# Every query in a tile of one shape, whether it comes alone or in a chunk.
INVARIANT_TILES = TileConfig(decode_lanes=0, decode_kv=128, prefill_queries=8, prefill_kv=128)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """EngineConfig's open questions, answered: sizes in tokens or sequences."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_read: int  # positions of prompts that a step can score or embed
    num_blocks: int  # the trash block included


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One of the model's parameters before it is loaded."""

    path: tuple[Any, ...]  # in the module's state
    shape: tuple[int, ...]
    dtype: Any
    outputs: int | None  # of an Int8Matrix's values: how many axes its scales have
    sharding: NamedSharding

    @property
    def bytes_per_device(self) -> int:
        """Of the part that one device holds."""
        size = jnp.dtype(self.dtype).itemsize
        for extent in self.sharding.shard_shape(self.shape):
            size *= extent
        return size


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """All of an engine but its weights. The same one is drawn for devices that are there and for those that are not."""

    model: ModelConfig
    dtype: Any  # of activations, and of weights that are not quantised
    limits: Limits
    code: ModelCode
    spec: RunnerSpec
    parameters: tuple[Parameter, ...]  # in the order of the flattened state
    mesh: Mesh | AbstractMesh

    @property
    def abstract_params(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The parameters as the programs take them."""
        return tuple(jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=p.sharding) for p in self.parameters)

    def recipes(self) -> Recipes:
        """The programs, by key."""
        return Recipes(self.model, self.code, self.spec, self.mesh, self.abstract_params)


def draw_blueprint(config: EngineConfig, model: ModelConfig, device: Device, mesh: Mesh | AbstractMesh) -> Blueprint:
    """Settle every size. `device` is one of the mesh's: its platform, and on a GPU its kind, its SMs and
    its memory_stats(), are read.

    Raises: ValueError for an option that does not work with the model or the device.
    """
    _check_backend("attention_backend", config.attention_backend, implementations())
    _check_backend("matmul_backend", config.matmul_backend, dense_implementations())
    dtype = resolve_dtype(config.dtype, model.dtype, device.platform)
    cache_dtype = dtype if config.kv_cache_dtype == "auto" else jnp.dtype(config.kv_cache_dtype)
    family = family_of(model)
    form = MatrixForm(dtype=dtype, quantization=config.quantization)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: family.module(model, form, rngs=nnx.Rngs(0))))
    parameters = _parameters(state, mesh)
    weights = sum(parameter.bytes_per_device for parameter in parameters)
    limits = resolve_limits(config, model, cache_dtype, device, weights)
    if config.batch_invariant:
        backends = _invariant_backends(config, mesh, device.platform)
    else:
        backends = _backends(config, mesh)
    spec = RunnerSpec(
        on_cpu=device.platform == "cpu",
        batch_invariant=config.batch_invariant,
        num_blocks=limits.num_blocks,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_logprobs=min(config.max_logprobs, model.vocab_size),
        dtype=dtype,
        cache_dtype=cache_dtype,
        batch=BatchShape(
            block_size=config.block_size,
            max_num_seqs=limits.max_num_seqs,
            max_num_read=limits.max_num_read,
            table_width=_table_width(limits.max_model_len, config.block_size),
            tiles=INVARIANT_TILES if config.batch_invariant else CPU_TILES,
            work=_work_config(backends.attention, model, config.block_size, cache_dtype, device, mesh),
        ),
    )
    code = ModelCode(graphdef=graphdef, params_tree=jax.tree.structure(state), backends=backends)
    return Blueprint(model=model, dtype=dtype, limits=limits, code=code, spec=spec, parameters=parameters, mesh=mesh)


def _check_backend(option: str, wanted: str, names: tuple[str, ...]) -> None:
    if wanted not in ("auto", *names):
        raise ValueError(f"{option}: wanted auto or one of {names}, got {wanted!r}")


def _on_one_cpu(wanted: str, mesh: Mesh | AbstractMesh, *, otherwise: str) -> str:
    """ "auto" stays so on one device. XLA cannot cut a call into foreign code: over several CPUs it is `otherwise`."""
    split_cpu = mesh.size > 1 and isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    return otherwise if wanted == "auto" and split_cpu else wanted


def resolve_dtype(wanted: str, checkpoint: str, platform: str) -> Any:
    """ "auto": float32 on CPU, where nothing else is fast; elsewhere the checkpoint's, float32 as bfloat16."""
    if wanted != "auto":
        return jnp.dtype(wanted)
    if platform == "cpu":
        return jnp.dtype(jnp.float32)
    return jnp.dtype(checkpoint if checkpoint in ("bfloat16", "float16") else "bfloat16")


def resolve_limits(
    config: EngineConfig, model: ModelConfig, cache_dtype: Any, device: Device, weight_bytes: int
) -> Limits:
    """Fill in what the config leaves to the model and the device.

    Without max_model_len the model's own limit counts, cut to what the cache holds. A given one may be more than the
    cache holds: the scheduler refuses prompts that do not fit. weight_bytes: of the weights on each device, which are
    not there yet. Raises: ValueError when max_model_len is beyond the model's.
    """
    on_cpu = device.platform == "cpu"
    longest = model.context_length
    wanted = config.max_model_len
    if wanted is not None and wanted > longest:
        raise ValueError(f"max_model_len: wanted at most the model's {longest}, got {wanted}")
    max_model_len = wanted or longest
    max_num_seqs = config.max_num_seqs or (64 if on_cpu else 256)
    num_blocks = count_blocks(
        config,
        model,
        cache_dtype,
        device,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        weight_bytes=weight_bytes,
    )
    room = (num_blocks - 1) * config.block_size
    if wanted is None:
        max_model_len = min(max_model_len, room)
    usual = max_num_seqs if config.batch_invariant else 512 if on_cpu else 2048
    budget = config.max_num_batched_tokens or usual
    most_read = 128 if on_cpu else 512
    return Limits(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_read=most_read if config.batch_invariant else min(budget, most_read),
        num_blocks=num_blocks,
    )


def _invariant_backends(config: EngineConfig, mesh: Mesh | AbstractMesh, platform: str) -> Backends:
    """Those whose sums do not depend on what else is in a step: attention for GPUs shares out its work otherwise."""
    attention = _backends(config, mesh).attention
    if attention not in ("auto", "numba", "tiled"):
        raise ValueError(f"attention_backend: wanted auto, numba or tiled with batch_invariant=True, got {attention!r}")
    if config.matmul_backend not in ("auto", "xla"):
        raise ValueError(f"matmul_backend: wanted auto or xla with batch_invariant=True, got {config.matmul_backend!r}")
    return Backends(attention="tiled" if attention == "auto" and platform != "cpu" else attention, matmul="xla")


def _backends(config: EngineConfig, mesh: Mesh | AbstractMesh) -> Backends:
    return Backends(
        attention=_on_one_cpu(config.attention_backend, mesh, otherwise="tiled"),
        matmul=_on_one_cpu(config.matmul_backend, mesh, otherwise="xla"),
    )


def _table_width(max_model_len: int, block_size: int) -> int:
    """Blocks of the longest sequence, rounded up to whole inner iterations of attention."""
    blocks = -(-max_model_len // block_size)
    multiple = max(1, CPU_TILES.decode_kv // block_size, CPU_TILES.prefill_kv // block_size)
    return -(-blocks // multiple) * multiple


def _work_config(
    backend: str, model: ModelConfig, block_size: int, cache_dtype: Any, device: Device, mesh: Mesh | AbstractMesh
) -> WorkConfig | None:
    """What the GPU kernels' work lists are made for: the kernel, the heads and the SMs of one device. None on CPU."""
    if device.platform != "gpu":
        return None
    choose = hopper_work_config if backend == "mosaic" else gpu_work_config
    return choose(
        target_of(device),
        groups=model.num_heads // model.num_kv_heads,
        num_kv_heads=model.num_kv_heads // mesh.shape[MODEL_AXIS],
        head_dim=model.head_dim,
        block_size=block_size,
        cache_dtype=cache_dtype,
    )


def _parameters(state: Any, mesh: Mesh | AbstractMesh) -> tuple[Parameter, ...]:
    leaves = {tuple(path): leaf for path, leaf in nnx.to_flat_state(state)}

    def outputs(path: tuple[Any, ...]) -> int | None:
        scales = leaves.get((*path[:-1], "scales"))
        return len(scales.shape) if path[-1] == "values" and scales is not None else None

    return tuple(
        Parameter(
            path=path,
            shape=leaf.shape,
            dtype=leaf.dtype,
            outputs=outputs(path),
            sharding=sharding_of(leaf.axes, leaf.shape, TENSOR_PARALLEL, mesh),
        )
        for path, leaf in leaves.items()
    )
