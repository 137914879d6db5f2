"""paged_attention: the op, and which implementation serves which platform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.paged_attention.batch import NO_EXTRAS, AttentionBatch, AttentionExtras, AttentionSpec
from jaxpaged.pallas_kernels.paged_attention.call import AttentionCall
from jaxpaged.pallas_kernels.paged_attention.cpu.op import numba_obstacle, paged_attention_numba
from jaxpaged.pallas_kernels.paged_attention.mosaic import mosaic_obstacle, paged_attention_mosaic
from jaxpaged.pallas_kernels.paged_attention.reference import paged_attention_reference
from jaxpaged.pallas_kernels.paged_attention.tiled import paged_attention_tiled
from jaxpaged.pallas_kernels.paged_attention.triton import obstacle, paged_attention_triton
from jaxpaged.pallas_kernels.platform import Candidate, DeviceTarget, current_target, first_fitting


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute the op."""

    run: Callable[..., jax.Array]  # (q, k_cache, v_cache, batch, spec, extras, interpret) → [T, K, G, H]
    obstacle: Callable[[DeviceTarget, AttentionCall], str | None]  # why it cannot serve a call; None: it can


def _no_obstacle(target: DeviceTarget, call: AttentionCall) -> None:
    del target, call


_IMPLEMENTATIONS: Mapping[str, Implementation] = MappingProxyType(
    {
        "tiled": Implementation(
            run=lambda *args, interpret: paged_attention_tiled(*args),
            obstacle=_no_obstacle,
        ),
        "numba": Implementation(run=paged_attention_numba, obstacle=numba_obstacle),
        "triton": Implementation(run=paged_attention_triton, obstacle=obstacle),
        "mosaic": Implementation(run=paged_attention_mosaic, obstacle=mosaic_obstacle),
        "reference": Implementation(
            run=lambda *args, interpret: paged_attention_reference(*args),
            obstacle=_no_obstacle,
        ),
    }
)
# What "auto" tries, in order. "mosaic" joins it for Hopper once it measures faster.
_AUTOMATIC: Mapping[str, tuple[str, ...]] = MappingProxyType({"gpu": ("triton",), "cpu": ("numba", "tiled")})
_AUTOMATIC_ELSEWHERE = ("tiled",)


def implementations() -> tuple[str, ...]:
    """Names that `implementation` takes, besides "auto"."""
    return tuple(_IMPLEMENTATIONS)


def choose_implementation(name: str, target: DeviceTarget, call: AttentionCall) -> str:
    """The implementation that serves the call on the target.

    Raises: ValueError for an unknown name, and where no candidate fits, with the reason of each.
    """
    if name != "auto" and name not in _IMPLEMENTATIONS:
        raise ValueError(f"paged_attention implementation: wanted auto or one of {implementations()}, got {name!r}")
    names = _AUTOMATIC.get(target.platform, _AUTOMATIC_ELSEWHERE) if name == "auto" else (name,)
    candidates = [Candidate(name=n, obstacle=_IMPLEMENTATIONS[n].obstacle(target, call)) for n in names]
    return first_fitting("paged_attention", target, candidates)


def paged_attention(
    q: Float[Array, "T K G H"],
    k_cache: Array,
    v_cache: Array,
    batch: AttentionBatch,
    spec: AttentionSpec,
    *,
    implementation: str,
    extras: AttentionExtras = NO_EXTRAS,
    interpret: bool = False,
) -> Float[Array, "T K G H"]:
    """Causal attention of ragged queries over block tables.

    Args:
        q: queries, grouped by KV head: query head k·G + g is [k, g].
        k_cache, v_cache: [N, K, B, H], N blocks of B tokens, in q's dtype or int8 or float8_e4m3fn with scales in
            extras; the keys of this step's own tokens are already written.
        batch: rows, tables and work lists, the same for every layer.
        spec: scale, window and soft cap of this layer.
        implementation: one of implementations(), or "auto": "triton" on GPUs; "numba" on a CPU where it can
            serve, "tiled" elsewhere. "numba" wants every array on one device.
        extras: attention sinks, ALiBi slopes, the cache's scales.
        interpret: run GPU kernels in Pallas' interpreter, on any platform; for tests.

    Returns: [T, K, G, H] in q's dtype; padding tokens' rows are finite and meaningless.
    Raises: ValueError for an unknown implementation, or one that cannot serve this call on this device.
    """
    shapes = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct(k_cache.shape, k_cache.dtype))
    _check_scales(k_cache.dtype, extras)
    call = AttentionCall(q=shapes[0], cache=shapes[1], batch=batch, spec=spec, extras=extras, interpret=interpret)
    name = choose_implementation(implementation, current_target(), call)
    return _IMPLEMENTATIONS[name].run(q, k_cache, v_cache, batch, spec, extras, interpret=interpret)


def _check_scales(dtype: jnp.dtype, extras: AttentionExtras) -> None:
    """Raises: ValueError unless a cache of one-byte numbers comes with both scales and any other with none."""
    scales = [extras.k_scale is not None, extras.v_scale is not None]
    wanted = [dtype in (jnp.int8, jnp.float8_e4m3fn)] * 2
    if scales != wanted:
        names = "k_scale and v_scale" if wanted[0] else "no scales"
        raise ValueError(f"paged_attention extras: a cache of {dtype} wants {names}, got k_scale, v_scale: {scales}")
