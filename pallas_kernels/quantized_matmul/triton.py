"""quantized_matmul for grouped weights as a Pallas kernel, lowered through Triton: NVIDIA GPUs from Ampere on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from jaxpaged.pallas_kernels.lowering import launch
from jaxpaged.pallas_kernels.quantized_matmul.kernel import Plan, grouped_kernel
from jaxpaged.pallas_kernels.quantized_matmul.tiles import DECODE_TOKENS, MIN_DOT, MatmulTiles
from jaxpaged.pallas_kernels.quantized_matmul.weight import Layout, QuantizedWeight


def quantized_matmul_triton(
    x: Float[Array, "T I"], weight: QuantizedWeight, *, tiles: MatmulTiles, num_cores: int, interpret: bool
) -> Float[Array, "T O"]:
    """Up to DECODE_TOKENS tokens the inputs are split so that num_cores multiprocessors are busy; the parts, in
    float32, are summed by XLA."""
    plan = make_plan(x.shape[0], weight, tiles, num_cores)
    grid = (
        -(-plan.num_outputs // plan.tile_outputs),
        -(-plan.num_tokens // plan.tokens),
        plan.splits,
    )
    dtype = x.dtype if plan.splits == 1 else jnp.float32
    (parts,) = launch(
        partial(grouped_kernel, plan=plan),
        _planes(x, weight.layout),
        weight.values,
        weight.scales,
        weight.zeros,
        name="quantized_matmul",
        grid=grid,
        outputs=[jax.ShapeDtypeStruct((plan.splits, plan.num_tokens, plan.num_outputs), dtype)],
        aliases={},
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        interpret=interpret,
    )
    return parts[0] if plan.splits == 1 else parts.sum(0).astype(x.dtype)


def _planes(x: Float[Array, "T I"], layout: Layout) -> Float[Array, "p T i"]:
    """x cut to match the words: input P·r + order[j] is [j, :, r]. One plane when words run along the outputs."""
    if layout.axis == "out":
        return x[None]
    cut = x.reshape(x.shape[0], -1, layout.per_word)
    return jnp.stack([cut[:, :, value] for value in layout.order])


def make_plan(num_tokens: int, weight: QuantizedWeight, tiles: MatmulTiles, num_cores: int) -> Plan:
    """The call's static side: tile sizes cut to the shapes, and how often the inputs are split."""
    layout = weight.layout
    inputs = _tile_inputs(weight, tiles)
    packed_in = layout.axis == "in"
    decode = num_tokens <= DECODE_TOKENS
    whole = Plan(
        layout=layout,
        group_size=weight.group_size,
        num_tokens=num_tokens,
        num_inputs=weight.num_inputs,
        num_outputs=weight.num_outputs,
        tokens=min(tiles.tokens, max(MIN_DOT, pl.next_power_of_2(num_tokens))),
        words=inputs // layout.per_word if packed_in else tiles.outputs // layout.per_word,
        others=tiles.outputs if packed_in else inputs,
        splits=1,
        scale_sums=decode and weight.group_size % inputs == 0,
    )
    if min(whole.words, whole.others) < MIN_DOT:
        raise ValueError(
            f"quantized_matmul tiles for {layout.name}: wanted at least {MIN_DOT * layout.per_word} along the packed "
            f"axis and {MIN_DOT} along the other, got {tiles.inputs} inputs and {tiles.outputs} outputs"
        )
    if not decode:
        return whole
    return _with_splits(whole, num_cores * tiles.instances_per_core)


def _tile_inputs(weight: QuantizedWeight, tiles: MatmulTiles) -> int:
    """The most inputs, tiles.inputs at most, of which a group holds a whole number of tiles; tiles.inputs if none is.

    Example: groups of 96 inputs, packed along the outputs, tiles of 128: 32.
    """
    least = MIN_DOT * (weight.layout.per_word if weight.layout.axis == "in" else 1)
    size = tiles.inputs
    while size >= least:
        if weight.group_size % size == 0:
            return size
        size //= 2
    return tiles.inputs


def _with_splits(plan: Plan, wanted_instances: int) -> Plan:
    """The plan with as many splits as bring it near wanted_instances, none of them empty."""
    outputs = -(-plan.num_outputs // plan.tile_outputs)
    splits = min(max(1, wanted_instances // outputs), plan.num_tiles)
    each = -(-plan.num_tiles // splits)
    return replace(plan, splits=-(-plan.num_tiles // each))
