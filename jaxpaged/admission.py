"""What a request must satisfy to be served by this engine, and the sequences it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpaged.constraints import TokenRules
from jaxpaged.models.config import ModelConfig
from jaxpaged.request import Readout, Request
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.stop_strings import resolve_stop_tokens
from jaxpaged.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A request that Admission.check found servable: Engine.submit takes it without looking again."""

    prompt: str | None  # None when it was given as token ids
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    rules: TokenRules
    readout: Readout | None = None  # what is read off the prompt
    generates: bool = True  # False: the readout is all that is wanted


class Admission:
    """Checks requests and makes their sequences. check() changes nothing and may be called from any thread."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        check_length: Callable[..., None],
        check_processor: Callable[[Callable[..., Any]], None],
        longest: int,
        max_logprobs: int,
        seed: int,
    ) -> None:
        """The checks raise ValueError: check_length(length, generates=…), check_processor(a logits_processor).

        longest is max_model_len.
        """
        self._model, self._tokenizer = model, tokenizer
        self._check_length, self._check_processor = check_length, check_processor
        self._longest = longest
        self._max_logprobs = max_logprobs
        self._eos_ids = model.eos_ids | (tokenizer.eos_ids if tokenizer else frozenset())
        self._seeds = np.random.default_rng(seed)

    def check(self, prompt_ids: Sequence[int], params: SamplingParams, *, prompt: str | None) -> Ticket:
        """The request's ticket. Raises ValueError if it cannot be served."""
        vocab_size = self._model.vocab_size
        self._check_ids(prompt_ids)
        kept = params.truncate_prompt_tokens
        if kept is not None:
            prompt_ids = prompt_ids[-(self._longest - 1 if kept == -1 else kept) :]
        self._check_length(len(prompt_ids))
        params.verify(vocab_size, self._max_logprobs)
        if params.stop and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this engine was built with skip_tokenizer_init=True")
        if params.logits_processor is not None:
            self._check_processor(params.logits_processor)
        readout = None
        if params.prompt_logprobs is not None and len(prompt_ids) > 1:
            num_top = vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs
            readout = Readout(first=0, stop=len(prompt_ids) - 1, scores=True, num_top=num_top)
        rules = TokenRules.of(params, self._tokenizer, vocab_size)
        ids = tuple(map(int, prompt_ids))
        return Ticket(prompt=prompt, prompt_ids=ids, params=params, rules=rules, readout=readout)

    def check_readout(self, prompt_ids: Sequence[int], readout: Readout) -> Ticket:
        """The ticket of a request that generates nothing. Raises ValueError if it cannot be served."""
        self._check_ids(prompt_ids)
        self._check_length(len(prompt_ids), generates=False)
        assert 0 <= readout.first < readout.stop <= len(prompt_ids) - readout.scores, f"{readout} is beyond the prompt"
        params = SamplingParams(temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        rules = TokenRules.of(params, None, self._model.vocab_size)
        ids = tuple(map(int, prompt_ids))
        return Ticket(prompt=None, prompt_ids=ids, params=params, rules=rules, readout=readout, generates=False)

    def requests(self, request_id: str, ticket: Ticket, *, priority: int) -> list[Request]:
        """The ticket's params.n sequences. Draws a seed if the request has none."""
        params = ticket.params
        seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
        eos_ids, stop_ids = self._ending_ids(params)
        requests: list[Request] = []
        for index in range(params.n):
            requests.append(
                Request(
                    request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                    prompt_ids=ticket.prompt_ids,
                    params=params,
                    eos_ids=eos_ids,
                    stop_ids=stop_ids,
                    max_tokens=params.max_tokens or self._longest,
                    readout=None if requests else ticket.readout,
                    generates=ticket.generates,
                    seed=(seed + index) % 2**64,
                    priority=priority,
                    cache_key=self._cache_key(len(ticket.prompt_ids)),
                    sibling=requests[0] if requests else None,
                    allowed=ticket.rules.allowed,
                    constraint=ticket.rules.constraint(),
                )
            )
        return requests

    def _check_ids(self, prompt_ids: Sequence[int]) -> None:
        vocab_size = self._model.vocab_size
        for token in prompt_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(f"prompt token ids must be in [0, {vocab_size}), the model's embedding, got {token}")

    def _ending_ids(self, params: SamplingParams) -> tuple[frozenset[int], frozenset[int]]:
        """End-of-sequence ids and stop ids that count for a request."""
        named = resolve_stop_tokens(params, self._tokenizer) if self._tokenizer is not None else frozenset()
        return frozenset() if params.ignore_eos else self._eos_ids, named.union(params.stop_ids)

    def _cache_key(self, num_prompt: int) -> bytes:
        """Dynamic rope: keys of a prompt beyond the original length depend on the prompt's length."""
        rope = self._model.rope
        if rope.kind != "dynamic" or num_prompt <= (rope.original_max_position or 0):
            return b""
        return num_prompt.to_bytes(8, "little")
