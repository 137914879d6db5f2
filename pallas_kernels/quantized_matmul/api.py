"""quantized_matmul: the op, and which implementation serves which layout and platform."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.platform import Candidate, DeviceTarget, current_target, first_fitting
from jaxpaged.pallas_kernels.quantized_matmul.amx.op import amx_obstacle, quantized_matmul_amx
from jaxpaged.pallas_kernels.quantized_matmul.reference import quantized_matmul_reference
from jaxpaged.pallas_kernels.quantized_matmul.tiles import MatmulTiles, choose_tiles
from jaxpaged.pallas_kernels.quantized_matmul.triton import quantized_matmul_triton
from jaxpaged.pallas_kernels.quantized_matmul.weight import Layout, QuantizedWeight, check_weight
from jaxpaged.pallas_kernels.quantized_matmul.xla import quantized_matmul_xla

_NAMES = ("xla", "triton", "amx", "reference")


def matmul_implementations() -> tuple[str, ...]:
    """Names that `implementation` takes, besides "auto"."""
    return _NAMES


def quantized_matmul(
    x: Float[Array, "T I"],
    weight: QuantizedWeight,
    *,
    implementation: str,
    int8_activations: bool,
    tiles: MatmulTiles | None = None,
    interpret: bool = False,
) -> Float[Array, "T O"]:
    """x · weightᵀ with float32 sums.

    Args:
        x: activations, bfloat16, float16 or float32.
        weight: of any layout; scales and zero points as in the checkpoint.
        implementation: one of matmul_implementations(), or "auto": the Pallas kernel for grouped weights on a GPU; the
            processor's tile unit for int8 with a scale per output and float32 activations on a CPU that has one; XLA
            elsewhere. "amx" wants every array on one device.
        int8_activations: round each row of x to int8 with a scale of its own and multiply integers; only for weights
            with a scale per output.
        tiles: instead of the table's, for the kernel; for tuning.
        interpret: run the kernel in Pallas's interpreter, on any platform; for tests.

    Returns: [T, O] in x's dtype.
    Raises: ValueError for shapes or dtypes the layout does not allow, and for an implementation that does not serve it.
    """
    check_weight(weight)
    if x.ndim != 2 or x.shape[1] != weight.num_inputs:
        raise ValueError(f"quantized_matmul x: wanted [tokens, {weight.num_inputs}], got {x.shape}")
    if str(x.dtype) not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"quantized_matmul x: wanted bfloat16, float16 or float32, got {x.dtype}")
    if int8_activations and weight.layout.grouped:
        raise ValueError(f"int8_activations: wanted a weight with a scale per output, got layout {weight.layout.name}")
    target = current_target()
    name = choose_matmul(implementation, weight.layout, target, x.dtype, interpret=interpret)
    if name == "triton":
        tiles = tiles or choose_tiles(target.kind, weight.layout, x.shape[0])
        return quantized_matmul_triton(x, weight, tiles=tiles, num_cores=target.num_cores or 1, interpret=interpret)
    functions = {"xla": quantized_matmul_xla, "amx": quantized_matmul_amx, "reference": quantized_matmul_reference}
    return functions[name](x, weight, int8_activations=int8_activations)


def choose_matmul(
    implementation: str, layout: Layout, target: DeviceTarget, dtype: jnp.dtype, *, interpret: bool
) -> str:
    """The implementation's name for this layout and activations of this dtype on this target.

    Raises: ValueError for an unknown name, or one that cannot serve it, with the reason.
    """
    if implementation == "auto":
        names = ("triton", "amx", "xla")
    elif implementation in _NAMES:
        names = (implementation,)
    else:
        raise ValueError(f"quantized_matmul implementation: wanted auto or one of {_NAMES}, got {implementation!r}")
    obstacles = {
        "triton": _triton_obstacle(layout, target, interpret=interpret),
        "amx": amx_obstacle(layout, target, dtype),
    }
    candidates = [Candidate(name=name, obstacle=obstacles.get(name)) for name in names]
    return first_fitting("quantized_matmul", target, candidates)


def _triton_obstacle(layout: Layout, target: DeviceTarget, *, interpret: bool) -> str | None:
    if not layout.grouped:
        return f"it serves weights with groups, got {layout.name}, which XLA's own product reads without a copy"
    if interpret:
        return None
    if target.platform != "gpu":
        return "it needs an NVIDIA GPU"
    if target.capability is None or target.capability < (8, 0):
        return "it needs compute capability 8.0 or more"
    return None
