"""Times the sampler's programs on this machine, beside a whole decode step or a sort-based sampler."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxpaged import LLM
from jaxpaged.constraints import pack
from jaxpaged.sampling import SampleOutput, SamplerMode, SamplingInput, build_sampling_input, sample
from jaxpaged.sampling_adjust import RowAdjustment, RowState, build_adjustments, history_row, neutral
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
ADJUSTED = {
    "none adjusted": SamplingParams(temperature=0.8, top_p=0.9),
    "greedy, penalties": SamplingParams(temperature=0.0, presence_penalty=0.5, repetition_penalty=1.1),
    "penalties": SamplingParams(temperature=0.8, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.1),
    "logit_bias": SamplingParams(temperature=0.8, top_p=0.9, logit_bias=dict.fromkeys(range(100), 1.0)),
    "allowed": SamplingParams(temperature=0.8, top_p=0.9, allowed_token_ids=range(20_000)),
}
STEP = "step"
UNDER_WAY = 1.0  # seconds in which the step that is under way ends
# The shape of SmolLM2-135M, but for the vocabulary.
STEP_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """The median over calls: a clock that ticks coarsely spoils the least, other work on the machine the mean."""

    wall: float
    processor: float

    def share(self, step: Seconds, greedy: Seconds) -> str:
        """What part of a decode step this sampler would be, given a step with the greedy one."""
        parts = [
            own / (whole - least + own)
            for own, whole, least in (
                (self.wall, step.wall, greedy.wall),
                (self.processor, step.processor, greedy.processor),
            )
        ]
        return f"{100 * parts[0]:5.1f}% of a step's wall, {100 * parts[1]:5.1f}% of its processor time"

    def __str__(self) -> str:
        return f"{1e3 * self.wall:8.2f} ms wall {1e3 * self.processor:8.2f} ms processor"


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


def medians(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, Seconds]:
    """Times all of them in turn, again and again, so that what else the machine does falls on all alike."""
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            if name == STEP:  # it leaves the next one under way: a whole one lies between two of them
                run()
            start = time.perf_counter(), time.process_time()
            run()
            spent[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
            if name == STEP:
                time.sleep(UNDER_WAY)
    return {name: Seconds(**_medians(times[1:])) for name, times in spent.items()}


def _medians(times: list[tuple[float, float]]) -> dict[str, float]:
    wall, processor = zip(*times, strict=True)
    return {"wall": statistics.median(wall), "processor": statistics.median(processor)}


def awaited(program: Callable[..., object], arguments: tuple[object, ...]) -> Callable[[], object]:
    """A call of the program that ends when its results are there."""
    return lambda: jax.block_until_ready(program(*arguments))


def decoding_engine(rows: int, vocab_size: int, repeats: int) -> LLM:
    """An engine in which `rows` greedy requests decode, with random weights and some 100 tokens each."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(STEP_MODEL | {"vocab_size": vocab_size}), "utf-8")
        safetensors.numpy.save_file({"unused": np.zeros(1, np.float32)}, Path(folder, "model.safetensors"))
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=1024,
            max_num_seqs=rows,
            max_num_batched_tokens=1024,
            warmup=False,
            use_tqdm_on_load=False,
        )
        generator = np.random.default_rng(0)
        for name in range(rows):
            prompt = generator.integers(0, vocab_size, 64).tolist()
            params = SamplingParams(temperature=0.0, max_tokens=2 * repeats + 200)
            llm.engine.add(str(name), prompt, params, prompt=None, priority=0)
        while llm.stats()["output_tokens"] < 3 * rows:  # prompts, and the compilation of what decoding needs
            llm.engine.step()
        return llm


def adjusted_arguments(params: SamplingParams, rows: int, vocab_size: int) -> tuple[SamplingInput, RowState]:
    """The arguments of an adjusting program, of `rows` rows with 100 tokens before them."""
    inputs = build_sampling_input(
        [(params, row, 100, ()) for row in range(rows)], rows, vocab_size=vocab_size, banned_width=8
    )
    allowed = params.allowed_token_ids
    mask = None if allowed is None else pack(allowed, vocab_size)
    asked = [RowAdjustment(params=params, num_prompt=50, mask=mask, processor=0)] * rows
    history = history_row(list(range(50)), list(range(25, 75)), vocab_size)
    state = RowState(
        histories=jnp.tile(jnp.asarray(history), (rows, 1)),
        slots=jnp.arange(rows, dtype=jnp.int32),
        last_tokens=jnp.zeros(rows, jnp.int32),
        positions=jnp.full(rows, 100, jnp.int32),
    )
    adjustments = build_adjustments(asked, neutral(rows, vocab_size), vocab_size)
    return jax.tree.map(jnp.asarray, replace(inputs, adjustments=adjustments)), state


def bench_shape(rows: int, vocab_size: int, options: argparse.Namespace) -> None:
    """Prints a line per mode and setting at one shape."""
    logits = jnp.asarray(peaked_logits(rows, vocab_size))
    runs: dict[str, Callable[[], object]] = {}
    if options.step:
        runs[STEP] = decoding_engine(rows, vocab_size, options.repeats).engine.step
    for greedy, max_logprobs, adjusts in (
        (True, None, False),
        (False, None, False),
        (False, 20, False),
        (False, 20, True),
    ):
        mode = SamplerMode(
            greedy=greedy,
            max_logprobs=max_logprobs,
            rows_per_pass=options.rows_per_pass,
            adjusts=adjusts,
            processors=(),
        )
        arguments = {name: _arguments(params, rows, vocab_size, adjusts) for name, params in _settings(mode).items()}

        def run(values: jax.Array, pair: tuple[SamplingInput, RowState | None], mode=mode) -> SampleOutput:
            return sample(values, pair[0], mode, pair[1])

        program, seconds = compile_program(run, logits, next(iter(arguments.values())))
        what = f"greedy={greedy} logprobs={max_logprobs} adjusts={adjusts}"
        print(f"V {vocab_size} S {rows} {what} compiled in {seconds:.2f} processor s", flush=True)
        runs |= {f"{what} {name}": awaited(program, (logits, pair)) for name, pair in arguments.items()}
    if options.reference:
        inputs = _arguments(SETTINGS["top_p 0.9"], rows, vocab_size, False)[0]
        program, seconds = compile_program(sort_based_sample, logits, inputs)
        print(f"V {vocab_size} S {rows} sort-based compiled in {seconds:.2f} processor s")
        runs["sort-based"] = awaited(program, (logits, inputs))
    found = medians(runs, options.repeats)
    step = found.pop(STEP, None)
    least = next(iter(found.values()))
    if step is not None:
        print(f"V {vocab_size} S {rows} decode step with the greedy sampler: {step}")
    for name, seconds in found.items():
        print(f"    {name:60s} {seconds} {'' if step is None else seconds.share(step, least)}")


def _settings(mode: SamplerMode) -> dict[str, SamplingParams]:
    if mode.greedy:
        return {"greedy": SETTINGS["greedy"]}
    return ADJUSTED if mode.adjusts else SETTINGS


def _arguments(
    params: SamplingParams, rows: int, vocab_size: int, adjusts: bool
) -> tuple[SamplingInput, RowState | None]:
    if adjusts:
        return adjusted_arguments(params, rows, vocab_size)
    asked = [(params, row, 7, ()) for row in range(rows)]
    return build_sampling_input(asked, rows, vocab_size=vocab_size, banned_width=8), None


def main() -> None:
    """Reads the options and times every shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, nargs="+", default=[49_152, 128_256])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows-per-pass", type=int, default=2)
    parser.add_argument("--step", action="store_true", help="compare with a decode step of a SmolLM2-sized model")
    parser.add_argument("--reference", action="store_true", help="time the sort-based sampler, too (slow)")
    options = parser.parse_args()
    for vocab_size in options.vocab:
        for rows in options.rows:
            bench_shape(rows, vocab_size, options)


if __name__ == "__main__":
    main()
