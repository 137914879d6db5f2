"""Small engines for tests: few buckets, programs compiled at first use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jaxpaged

WAYS_TO_STEP: dict[str, dict[str, Any]] = {  # options of small_llm that must change no answer
    "run-ahead": {},
    "one step at a time": {"async_scheduling": False},
    "preemption": {"num_gpu_blocks_override": 17},
    "chunks": {"max_num_batched_tokens": 4, "max_num_seqs": 3},
}


def small_llm(path: Path | str, **options: Any) -> jaxpaged.LLM:
    """An LLM over a tiny checkpoint: blocks of 4 tokens, 8 sequences, steps of 32 tokens; options win."""
    defaults = {
        "block_size": 4,
        "num_gpu_blocks_override": 200,
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "warmup": False,
        "use_tqdm_on_load": False,
    }
    return jaxpaged.LLM(str(path), **{**defaults, **options})
