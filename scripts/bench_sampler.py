"""Times the sampler's programs on this machine, and a sort-based sampler beside them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from jaxpaged.sampling import SamplerMode, SamplingInput, build_sampling_input, sample
from jaxpaged.sampling_params import SamplingParams

SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_k 1000": SamplingParams(temperature=0.8, top_k=1000),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "top_k 50 top_p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
}


def peaked_logits(rows: int, vocab_size: int) -> np.ndarray:
    """Logits as of a language model, f32[rows, V]: most entries far down, some dozens sharing most of the mass."""
    generator = np.random.default_rng(0)
    logits = generator.normal(0.0, 2.0, (rows, vocab_size)).astype(np.float32)
    peaks = generator.integers(0, vocab_size, (rows, 300))
    heights = 16.0 - 1.6 * np.log(1.0 + np.arange(300)) + generator.normal(0.0, 0.5, (rows, 300))
    np.put_along_axis(logits, peaks, heights.astype(np.float32), 1)
    return logits


def sort_based_sample(logits: jax.Array, inputs: SamplingInput) -> jax.Array:
    """The same filters by sorting the vocabulary, the noise from jax.random: tokens int32[S]."""
    scaled = logits / jnp.maximum(jnp.asarray(inputs.temperature), 1e-5)[:, None]
    order = jnp.argsort(-scaled, axis=1)
    ranked = jnp.take_along_axis(scaled, order, 1)
    keep = ranked >= ranked[:, :1] + jnp.log(jnp.asarray(inputs.min_p))[:, None]
    limit = jnp.where(jnp.asarray(inputs.top_k) == 0, logits.shape[1], jnp.asarray(inputs.top_k))
    keep &= jnp.arange(logits.shape[1])[None] < limit[:, None]
    chances = jax.nn.softmax(jnp.where(keep, ranked, -jnp.inf), axis=1)
    keep &= jnp.cumsum(chances, 1) - chances < jnp.asarray(inputs.top_p)[:, None]
    keys = jax.vmap(jax.random.fold_in)(jax.vmap(jax.random.key)(jnp.asarray(inputs.seed)[:, 0]), inputs.position)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (logits.shape[1],)))(keys)
    place = jnp.argmax(jnp.where(keep, ranked + noise, -jnp.inf), 1)
    return jnp.take_along_axis(order, place[:, None], 1)[:, 0]


def compile_program(function: Callable[..., object], *example: object) -> tuple[Callable[..., object], float]:
    """The compiled program and the processor seconds it took, tracing included."""
    start = time.process_time()
    program = jax.jit(function).lower(*example).compile()
    return program, time.process_time() - start


def timing(program: Callable[..., object], arguments: tuple[object, ...], repeats: int) -> str:
    """Medians over calls, after one that does not count: wall time, and processor time (steadier on a busy box)."""
    jax.block_until_ready(program(*arguments))
    wall, processor = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        jax.block_until_ready(program(*arguments))
        wall.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    return f"{1e3 * median(wall):8.2f} ms wall {1e3 * median(processor):8.2f} ms processor"


def bench_shape(rows: int, vocab_size: int, options: argparse.Namespace) -> None:
    """Prints a line per mode and setting at one shape."""
    logits = jnp.asarray(peaked_logits(rows, vocab_size))
    inputs = {
        name: build_sampling_input(
            [(params, row, 7, ()) for row in range(rows)], rows, vocab_size=vocab_size, banned_width=8
        )
        for name, params in SETTINGS.items()
    }
    for greedy in (True, False):
        for max_logprobs in (None, 20):
            mode = SamplerMode(
                greedy=greedy,
                max_logprobs=max_logprobs,
                rows_per_pass=options.rows_per_pass,
                adjusts=False,
                processors=(),
            )
            program, seconds = compile_program(
                lambda *pair, mode=mode: sample(*pair, mode, None), logits, inputs["greedy"]
            )
            print(
                f"V {vocab_size} S {rows} greedy={greedy} logprobs={max_logprobs} compiled in {seconds:.2f} processor s"
            )
            for name in ("greedy",) if greedy else SETTINGS:
                print(f"    {name:20s} {timing(program, (logits, inputs[name]), options.repeats)}")
    if options.reference:
        program, seconds = compile_program(sort_based_sample, logits, inputs["greedy"])
        print(f"V {vocab_size} S {rows} sort-based: compiled in {seconds:.2f} processor s")
        print(f"    {'any':20s} {timing(program, (logits, inputs['top_p 0.9']), 1)}")


def main() -> None:
    """Reads the options and times every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 128_256])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows-per-pass", type=int, default=2)
    parser.add_argument("--reference", action="store_true", help="time the sort-based sampler, too (slow)")
    options = parser.parse_args()
    for vocab_size in options.vocab:
        for rows in options.rows:
            bench_shape(rows, vocab_size, options)


if __name__ == "__main__":
    main()
