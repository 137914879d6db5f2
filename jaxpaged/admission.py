"""What a request must satisfy to be served by this engine, and the sequences it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.blueprint import Limits
from jaxpaged.constraints import TokenConstraint, TokenRules, together
from jaxpaged.jump_ahead import may_jump_ahead
from jaxpaged.models.config import ModelConfig
from jaxpaged.request import Readout, Request
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.stop_strings import resolve_stop_tokens
from jaxpaged.structured_outputs import GrammarConstraint, StructuredOutputs
from jaxpaged.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """A request that Admission.check found servable: Engine.submit takes it without looking again."""

    prompt: str | None  # None when it was given as token ids
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    rules: TokenRules
    structure: GrammarConstraint | None  # at its beginning
    beams: BeamSearchParams | None = None  # of a beam search; params are then those of each beam
    readout: Readout | None = None  # what is read off the prompt
    generates: bool = True  # False: the readout is all that is wanted

    @property
    def num_sequences(self) -> int:
        """Sequences that it can become: samples or beams."""
        return self.params.n if self.beams is None else self.beams.beam_width

    def constraint(self) -> TokenConstraint | None:
        """For one more sequence: what its next token may be, where that depends on the ones before."""
        found = (self.rules.constraint(), None if self.structure is None else self.structure.fork())
        return together([each for each in found if each is not None])


class Admission:
    """Checks requests and makes their sequences. check() changes nothing and may be called from any thread."""

    def __init__(
        self,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        *,
        check_length: Callable[..., None],
        check_processor: Callable[[Callable[..., Any]], None],
        limits: Limits,
        max_logprobs: int,
        seed: int,
    ) -> None:
        """The checks raise ValueError: check_length(length, generates=…), check_processor(a logits_processor)."""
        self._model, self._tokenizer = model, tokenizer
        self._check_length, self._check_processor = check_length, check_processor
        self._longest = limits.max_model_len
        self._max_logprobs = max_logprobs
        self._most_beams = min(limits.max_num_seqs, limits.max_num_batched_tokens)  # sequences that can run at once
        self._eos_ids = model.eos_ids | (tokenizer.eos_ids if tokenizer else frozenset())
        self._structures = StructuredOutputs(tokenizer, model.vocab_size)
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
        return Ticket(
            prompt=prompt,
            prompt_ids=tuple(map(int, prompt_ids)),
            params=params,
            rules=TokenRules.of(params, self._tokenizer, vocab_size),
            structure=self._structure(params),
            readout=readout,
        )

    def check_readout(self, prompt_ids: Sequence[int], readout: Readout) -> Ticket:
        """The ticket of a request that generates nothing. Raises ValueError if it cannot be served."""
        self._check_ids(prompt_ids)
        self._check_length(len(prompt_ids), generates=False)
        assert 0 <= readout.first < readout.stop <= len(prompt_ids) - readout.scores, f"{readout} is beyond the prompt"
        params = SamplingParams(temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        return Ticket(
            prompt=None,
            prompt_ids=tuple(map(int, prompt_ids)),
            params=params,
            rules=TokenRules.of(params, None, self._model.vocab_size),
            structure=None,
            readout=readout,
            generates=False,
        )

    def check_beams(self, prompt_ids: Sequence[int], beams: BeamSearchParams, *, prompt: str | None) -> Ticket:
        """The ticket of a beam search. Raises ValueError if it cannot be served."""
        if beams.beam_width > self._most_beams:
            raise ValueError(
                f"beam_width must be at most {self._most_beams}, the sequences that run at once, got "
                f"{beams.beam_width}; lower it or raise max_num_seqs (and max_num_batched_tokens) of the engine"
            )
        vocab_size = self._model.vocab_size
        eos_ids, stop_ids = self._ending_ids(beams.sampling_params(0))
        wanted = beams.num_candidates(len(eos_ids | stop_ids), vocab_size)
        if wanted > self._max_logprobs:
            raise ValueError(
                f"beam_width={beams.beam_width} with {len(eos_ids | stop_ids)} ids that end a sequence"
                f"{' and stop strings' if beams.stop else ''} needs the {wanted} best log-probabilities after each "
                f"beam, got max_logprobs={self._max_logprobs}; raise max_logprobs of the engine or lower beam_width"
            )
        ticket = self.check(prompt_ids, beams.sampling_params(wanted), prompt=prompt)
        return replace(ticket, beams=beams)

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
                    lockstep=ticket.beams is not None,
                    allowed=ticket.rules.allowed,
                    constraint=ticket.constraint(),
                    jumps_ahead=ticket.structure is not None and may_jump_ahead(params),
                )
            )
        return requests

    def _structure(self, params: SamplingParams) -> GrammarConstraint | None:
        if params.structured_outputs is None:
            return None
        eos_ids, stop_ids = self._ending_ids(params)
        return self._structures.constraint(params.structured_outputs, eos_ids | stop_ids)

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
