"""One measurement of torch: python -m scripts.gpu_check.torch_peer '{"peer": …}' prints a JSON object."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch


def main() -> None:
    job = json.loads(sys.argv[1])
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no GPU")
    measure = {"torch SDPA": attention, "transformers generate": generate}[job["peer"]]
    print(json.dumps(measure(job)))


def attention(job: dict[str, Any]) -> dict[str, Any]:
    """Decode over dense keys and values, grouped heads."""
    num_heads, groups, head_dim = job["heads"]
    rows, length = job["rows"], job["context"]
    options: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)
    q = torch.randn(rows, num_heads * groups, 1, head_dim, **options)
    k, v = (torch.randn(rows, num_heads, length, head_dim, **options) for _ in range(2))

    def step() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    seconds = best_seconds(lambda: [step() for _ in range(16)], job["rounds"]) / 16
    rate = 2 * k.numel() * k.element_size() / seconds
    return {"microseconds": seconds * 1e6, "gb_per_second": rate / 1e9}


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Greedy generation of one static batch by a random model made on the GPU."""
    import transformers

    config = transformers.LlamaConfig(**job["config"])
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.randint(3, config.vocab_size, (job["requests"], job["prompt"]), device="cuda")

    @torch.no_grad()
    def step(tokens: int) -> None:
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
            pad_token_id=0,
        )  # fmt: skip

    step(2)
    seconds = best_seconds(lambda: step(job["output"]), 1)
    return {"tokens_per_second": job["requests"] * job["output"] / seconds, "seconds": seconds}


def best_seconds(run: Callable[[], object], rounds: int) -> float:
    best = float("inf")
    for _ in range(rounds + 1):  # the first warms up
        torch.cuda.synchronize()
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return best


if __name__ == "__main__":
    main()
