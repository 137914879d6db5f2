"""What a structure costs: the same requests with and without a JSON schema, in turns, on one engine.

python -m scripts.bench_structured --requests 16 --tokens 64 --rounds 5
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

from jaxpaged import LLM, SamplingParams
from jaxpaged.structured_params import StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z.]{1,20}@[a-z]{1,20}\\.(com|org)$"},
        "role": {"enum": ["reader", "writer", "editor", "owner"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "city"],
        },
    },
    "required": ["name", "age", "email", "role", "tags", "address"],
    "additionalProperties": False,
}
# Records without end, so that every request generates as many tokens as it may, with and without the structure.
PEOPLE = {"type": "array", "items": PERSON, "minItems": 1000}
PROMPT = "Some people of the town, as a JSON list, number {}:\n"
NO_WHITESPACE = "no whitespace"  # with jump-ahead: keys and punctuation are forced


def variants(temperature: float, tokens: int) -> dict[str, SamplingParams]:
    """By name: without a structure, with it, with it and no whitespace, which forces most."""
    common: dict[str, Any] = {"temperature": temperature, "max_tokens": tokens, "ignore_eos": True, "seed": 0}
    flexible = StructuredOutputsParams(json=PEOPLE, whitespace_pattern="[ \n]{0,2}")
    dense = StructuredOutputsParams(json=PEOPLE, disable_any_whitespace=True)
    return {
        "free": SamplingParams(**common),
        "schema": SamplingParams(**common, structured_outputs=flexible),
        NO_WHITESPACE: SamplingParams(**common, structured_outputs=dense),
    }


def run(llm: LLM, params: SamplingParams, requests: int) -> dict[str, float]:
    """One pass over the requests: milliseconds per token of a sequence, also of CPU time; steps and their length.

    CPU time, of all threads, tells the host's work where other processes take turns with this one.
    """
    before, begun, used = llm.stats(), time.perf_counter(), time.process_time()
    outputs = llm.generate([PROMPT.format(number) for number in range(requests)], params, use_tqdm=False)
    seconds, used = time.perf_counter() - begun, time.process_time() - used
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    if set(lengths) != {params.max_tokens}:
        raise RuntimeError(f"wanted {params.max_tokens} tokens of every request, got {lengths}")
    steps = llm.stats()["steps"] - before["steps"]
    return {
        "ms per token": 1e3 * seconds / lengths[0],
        "CPU ms per token": 1e3 * used / lengths[0],
        "steps": steps,
        "ms per step": 1e3 * seconds / steps,
    }


def compare(llm: LLM, *, temperature: float, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians by variant. Rounds run the variants in turns, after one that does not count."""
    params = variants(temperature, options.tokens)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in params}
    for number in range(options.rounds + 1):
        for name in params:
            result = run(llm, params[name], options.requests)
            if number:
                found[name].append(result)
    return {name: {key: median(row[key] for row in rows) for key in rows[0]} for name, rows in found.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--requests", type=int, default=16, help="at once")
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    options = parser.parse_args(arguments)
    llm = LLM(options.model, max_num_seqs=options.requests, enable_prefix_caching=False)
    for temperature in options.temperatures:
        medians = compare(llm, temperature=temperature, options=options)
        free = medians["free"]["ms per token"]
        print(f"temperature {temperature:g}, {options.requests} requests of {options.tokens} tokens")
        for name, row in medians.items():
            figures = ", ".join(f"{key} {value:.2f}" for key, value in row.items())
            print(f"  {name:14s} {figures}, time per token {row['ms per token'] / free - 1:+.1%}")


if __name__ == "__main__":
    main()
