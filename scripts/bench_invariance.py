"""What batch_invariant=True costs: one stream and many, with it and without."""

from __future__ import annotations

import argparse
import statistics
import time

from jaxpaged import LLM, SamplingParams


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=16, help="requests at once, and max_num_seqs")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens generated for each")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found = {invariant: measure(options, invariant) for invariant in (False, True)}
    print("| | without | batch_invariant | times as long |")
    print("|---|---|---|---|")
    for name in found[False]:
        before, after = found[False][name], found[True][name]
        print(f"| {name} | {before:.2f} s | {after:.2f} s | {after / before:.2f} |")


def measure(options: argparse.Namespace, invariant: bool) -> dict[str, float]:
    """Seconds of each case: the median of the repeats, after one that compiles."""
    llm = LLM(
        options.model,
        max_model_len=options.prompt + options.tokens,
        max_num_seqs=options.streams,
        batch_invariant=invariant,
        enable_prefix_caching=False,
        warmup=False,
        use_tqdm_on_load=False,
    )
    cases = {
        f"1 request, {options.tokens} tokens": (1, options.tokens, 1),
        f"{options.streams} requests, {options.tokens} tokens": (options.streams, options.tokens, 1),
        f"{options.streams} prompts of {options.prompt} tokens, 1 token": (options.streams, 1, options.prompt),
    }
    return {name: statistics.median(seconds(llm, options.repeats, *case)) for name, case in cases.items()}


def seconds(llm: LLM, repeats: int, requests: int, tokens: int, prompt: int) -> list[float]:
    """Of each repeat."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    times: list[float] = []
    for _ in range(repeats + 1):
        begun = time.perf_counter()
        llm.generate([[100 + index] * prompt for index in range(requests)], params, use_tqdm=False)
        times.append(time.perf_counter() - begun)
    return times[1:]


if __name__ == "__main__":
    main()
