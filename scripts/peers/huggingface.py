"""Benchmark adapter: Hugging Face transformers, one request after the other or in static batches.

Options: batch_size (requests of a static batch, in order), dtype (float32 or bfloat16).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from scripts.peers.protocol import Answer, Job, Request, adapter_main


class _Clock(transformers.StoppingCriteria):
    """Notes the time at which each generation step ended; never stops."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class HuggingFace:
    """transformers' generate() with left padding."""

    def __init__(self, job: Job) -> None:
        torch.set_num_threads(job.threads)
        dtype = getattr(torch, job.options["dtype"])
        self._model = transformers.AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0
        self._batch_size = job.options["batch_size"]

    def generate(self, requests: Sequence[Request]) -> Answer:
        began = time.perf_counter()
        token_ids: list[list[int]] = []
        first: list[float | None] = []
        finish: list[float | None] = []
        for start in range(0, len(requests), self._batch_size):
            batch = requests[start : start + self._batch_size]
            outputs, times = self._batch(batch)
            for request, ids in zip(batch, outputs, strict=True):
                token_ids.append(ids[: request.out_len])
                first.append(times[0] - began)
                finish.append(times[request.out_len - 1] - began)
        return Answer(token_ids=token_ids, first_token_s=first, finish_s=finish)

    @torch.no_grad()
    def _batch(self, batch: Sequence[Request]) -> tuple[list[list[int]], list[float]]:
        width = max(len(request.prompt_ids) for request in batch)
        steps = max(request.out_len for request in batch)
        padding = [width - len(request.prompt_ids) for request in batch]
        ids = [[0] * pad + request.prompt_ids for pad, request in zip(padding, batch, strict=True)]
        mask = [[0] * pad + [1] * (width - pad) for pad in padding]
        clock = _Clock()
        output = self._model.generate(
            torch.tensor(ids),
            attention_mask=torch.tensor(mask),
            do_sample=False,
            max_new_tokens=steps,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
        return output[:, width:].tolist(), clock.times

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "transformers": transformers.__version__}

    def close(self) -> None:
        """Nothing to do."""


if __name__ == "__main__":
    adapter_main(HuggingFace)
