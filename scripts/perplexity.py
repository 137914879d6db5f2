"""Perplexity of a text under engines that differ by one option, and how far they are from the first.

    python -m scripts.perplexity --model demo --quantization none int8 int8_w8a8

The text is cut into windows; a token is scored given those before it in its window, a window's first not at all.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import jax

import jaxpaged

ALICE = Path(__file__).resolve().parent.parent / "tests" / "texts" / "alice.txt"  # Lewis Carroll, 1865


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", type=Path, default=ALICE)
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int8_w8a8"])
    options = parser.parse_args()
    print("| quantization | weights MiB | perplexity | against the first |")
    print("|---|---|---|---|")
    first = None
    for name in options.quantization:
        llm = jaxpaged.LLM(
            options.model, quantization=None if name == "none" else name, max_model_len=options.window + 1,
            warmup=False, use_tqdm_on_load=False,
        )  # fmt: skip
        found = perplexity(llm, options.text.read_text(), options.window)
        first = first or found
        print(
            f"| {name} | {weight_bytes(llm) / 2**20:.1f} | {found:.4f} | {100 * (found / first - 1):+.2f} % |",
            flush=True,
        )


def perplexity(llm: jaxpaged.LLM, text: str, window: int) -> float:
    """exp of the mean negative log-probability of the text's tokens."""
    ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
    parts = [ids[start : start + window] for start in range(0, len(ids) - 1, window)]
    scores = llm.score_continuations(
        [{"prompt_token_ids": part[:1]} for part in parts],
        [{"prompt_token_ids": part[1:]} for part in parts],
        use_tqdm=False,
    )
    return math.exp(-sum(score.logprob for score in scores) / sum(len(score.logprobs) for score in scores))


def weight_bytes(llm: jaxpaged.LLM) -> int:
    """Of the model's arrays."""
    return sum(array.nbytes for array in jax.tree.leaves(llm.model_state()[1]))


if __name__ == "__main__":
    main()
