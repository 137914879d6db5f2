"""Bounded soak: serve many small, varied requests and watch the process's memory and the block pool.

    python -m scripts.soak --model demo --requests 2000

Prints resident memory and blocks after every --every requests. Exits 1 when memory grew by more than --allow-mib after
the first quarter (which fills caches), when blocks are still held at the end, or when a program was compiled late.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import jaxpaged

SHARED_PREFIX = 32  # tokens that a third of the prompts begin with
PROMPT = (1, 48)  # own tokens of a prompt
OUTPUT = (1, 12)


def resident_mib() -> float:
    """Resident memory of this process in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def make_request(rng: random.Random, prefix: list[int], vocab_size: int) -> tuple[Any, jaxpaged.SamplingParams]:
    """Token ids and parameters: greedy or sampled, some with several samples, log-probabilities or stop ids."""
    ids = [rng.randrange(vocab_size) for _ in range(rng.randint(*PROMPT))]
    if rng.random() < 1 / 3:
        ids = prefix + ids
    temperature = rng.choice((0.0, 0.7, 1.0))
    params = jaxpaged.SamplingParams(
        n=rng.choice((1, 1, 2)) if temperature else 1,
        temperature=temperature,
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 20)),
        max_tokens=rng.randint(*OUTPUT),
        logprobs=rng.choice((None, None, 3)),
        stop_token_ids=rng.sample(range(vocab_size), 2) if rng.random() < 0.2 else None,
        ignore_eos=rng.random() < 0.5,
    )
    return {"prompt_token_ids": ids}, params


def abandon_one(llm: jaxpaged.LLM, rng: random.Random, vocab_size: int) -> None:
    """Start a stream and leave it after its first output; then have a bad request refused."""
    prompt, _ = make_request(rng, [], vocab_size)
    stream = llm.generate_stream(prompt, jaxpaged.SamplingParams(max_tokens=8, ignore_eos=True))
    next(stream)
    stream.close()
    try:
        llm.generate({"prompt_token_ids": [vocab_size]}, use_tqdm=False)
    except ValueError:
        return
    raise RuntimeError(f"wanted a ValueError for token id {vocab_size}, which is outside the vocabulary")


def report(llm: jaxpaged.LLM, served: int, began: float) -> dict[str, float]:
    """Print and return a line of figures."""
    stats = llm.stats()
    names = ("blocks_used", "blocks_used_peak", "preemptions", "prefix_hits", "late_compilations")
    line = {"requests": served, "seconds": round(time.monotonic() - began, 1), "rss_mib": round(resident_mib(), 1)}
    line |= {name: stats[name] for name in names}
    print(json.dumps(line), flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=jaxpaged.DEMO_MODEL)
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=JSON", help="of jaxpaged.LLM")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--every", type=int, default=200, help="requests of one call, after which a line is printed")
    parser.add_argument("--allow-mib", type=float, default=16.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    keywords = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in options.option)}
    llm = jaxpaged.LLM(options.model, **keywords)
    rng = random.Random(options.seed)
    vocab_size = llm.engine.model_config.vocab_size
    prefix = [rng.randrange(vocab_size) for _ in range(SHARED_PREFIX)]
    began = time.monotonic()
    lines = [report(llm, 0, began)]
    for served in range(options.every, options.requests + 1, options.every):
        rows = [make_request(rng, prefix, vocab_size) for _ in range(options.every)]
        llm.generate([prompt for prompt, _ in rows], [params for _, params in rows], use_tqdm=False)
        abandon_one(llm, rng, vocab_size)
        llm.engine.check_invariants()
        lines.append(report(llm, served, began))
    settled, last = lines[(len(lines) + 3) // 4], lines[-1]
    growth = last["rss_mib"] - settled["rss_mib"]
    print(f"growth after the first quarter: {growth:.1f} MiB; blocks held at the end: {last['blocks_used']}")
    if growth > options.allow_mib or last["blocks_used"] or last["late_compilations"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
