"""The engine end to end: tokens per second over the number of requests, on a random model made on the device."""

from __future__ import annotations

import time
from typing import Any

from jaxpaged import LLM, SamplingParams
from scripts.gpu_check.context import Context
from scripts.gpu_check.model import prompts, write_folder

BLOCK_SIZE = 16


def run(context: Context) -> None:
    """bfloat16 weights. Programs compile at first use, in a run before the one that counts."""
    sizes = context.sizes
    folder = context.record.folder / "model"
    write_folder(folder, sizes)
    blocks = -(-(sizes.prompt + sizes.output) // BLOCK_SIZE) + 1
    llm = LLM(
        str(folder),
        load_format="dummy",
        dtype=sizes.dtype,
        skip_tokenizer_init=True,
        warmup=False,
        use_tqdm_on_load=False,
        max_num_seqs=max(sizes.batches),
        max_model_len=sizes.prompt + sizes.output,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=max(sizes.batches) * blocks + 1,
        compilation_cache_dir=str(folder / "programs"),
    )
    for count in sizes.batches:
        facts = {"weights": sizes.dtype, "requests": count, "prompt": sizes.prompt, "output": sizes.output}
        context.case(facts, lambda count=count: _time(context, llm, count), seconds=40.0)


def _time(context: Context, llm: LLM, count: int) -> dict[str, Any]:
    sizes = context.sizes
    begun = time.perf_counter()
    _generate(llm, prompts(sizes, count), 2 + sizes.output // 16)
    first = time.perf_counter() - begun
    fresh = [prompt[::-1] for prompt in prompts(sizes, count)]
    begun = time.perf_counter()
    tokens = _generate(llm, fresh, sizes.output)
    seconds = time.perf_counter() - begun
    return {"tokens_per_second": tokens / seconds, "seconds": seconds, "first_run_seconds": first}


def _generate(llm: LLM, requests: list[list[int]], output: int) -> int:
    """Number of tokens generated."""
    params = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in requests], params, use_tqdm=False)
    return sum(len(request.outputs[0].token_ids) for request in outputs)
