"""Products with quantised weights beside the bfloat16 product of the same shape, over numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpaged.pallas_kernels import LAYOUTS, Layout, QuantizedWeight, quantized_matmul
from scripts.gpu_check.context import Context, timed, waves

BFLOAT16 = "bfloat16"


def run(context: Context) -> None:
    for inputs, outputs in context.sizes.weights:
        for tokens in context.sizes.tokens:
            for name, variant in _variants().items():
                facts = {"weight": name, "inputs": inputs, "outputs": outputs, "tokens": tokens}

                def measure(variant=variant, inputs=inputs, outputs=outputs, tokens=tokens) -> dict[str, Any]:
                    return _time(context, variant, inputs, outputs, tokens)

                context.case(facts, measure, seconds=4.0)


def _variants() -> dict[str, tuple[str, str, bool]]:
    """Name → (layout or bfloat16, implementation, int8 activations)."""
    return {
        BFLOAT16: (BFLOAT16, "xla", False),
        "int8": ("int8", "auto", False),
        "gptq-int4": ("gptq-int4", "triton", False),
        "awq-int4": ("awq-int4", "triton", False),
        "int8, int8 activations": ("int8", "auto", True),
        "gptq-int8": ("gptq-int8", "triton", False),
        "gptq-int4 in XLA": ("gptq-int4", "xla", False),
    }


def _time(context: Context, variant: tuple[str, str, bool], inputs: int, outputs: int, tokens: int) -> dict[str, Any]:
    sizes = context.sizes
    layout, implementation, int8_activations = variant
    x = waves((tokens, inputs), jnp.bfloat16)
    weight: Any
    product: Callable[..., jax.Array]
    if layout == BFLOAT16:
        weight = waves((outputs, inputs), jnp.bfloat16)
        read, product = weight.nbytes, lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())))
    else:
        weight = any_weight(LAYOUTS[layout], inputs, outputs, sizes.group)
        read = weight.nbytes
        product = partial(
            quantized_matmul,
            implementation=implementation,
            int8_activations=int8_activations,
            interpret=sizes.dry and implementation == "triton",
        )

    def step(x: jax.Array, weight: Any) -> jax.Array:
        return x + product(x, weight)[:, :1] * jnp.bfloat16(1e-30)  # the next step needs all of this one

    seconds = timed(step, x, weight, repeats=sizes.repeats, rounds=sizes.rounds)
    flops = 2 * tokens * inputs * outputs / seconds
    return {
        "microseconds": seconds * 1e6,
        "gb_per_second": read / seconds / 1e9,
        "share_of_read": context.share("read_bytes_per_second", read / seconds),
        "tflops": flops / 1e12,
        "share_of_matmul": context.share("matmul_flops_per_second", flops),
    }


def any_weight(layout: Layout, inputs: int, outputs: int, group: int) -> QuantizedWeight:
    """A weight of arbitrary integers, made on the device: packing real numbers would take longer than the product."""
    words = layout.per_word
    if not layout.grouped:
        values = (waves((outputs, inputs), jnp.float32) * 127).astype(jnp.int8)
        scales = jnp.full((outputs,), 1e-3)
        return QuantizedWeight(values=values, scales=scales, zeros=None, layout=layout, group_size=inputs)
    shape = (inputs // words, outputs) if layout.axis == "in" else (inputs, outputs // words)
    return QuantizedWeight(
        values=_integers(shape),
        scales=jnp.full((inputs // group, outputs), 1e-3, jnp.bfloat16),
        zeros=_integers((inputs // group, -(-outputs // words))),
        layout=layout,
        group_size=group,
    )


def _integers(shape: tuple[int, ...]) -> jax.Array:
    return (waves(shape, jnp.float32) * 2.0**30).astype(jnp.int32)
