"""From a request's tokens to what its caller sees: text, log-probabilities, outputs of the kind asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxpaged.detokenizer import Detokenizer, StopMatch
from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpaged.plan import TokenLogprobs
from jaxpaged.prompt_scores import PromptLogprobs, complete_reading, prompt_logprobs
from jaxpaged.request import FinishReason, Request, described
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class RequestMetrics:
    """Times of a request on the monotonic clock, in seconds."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None


class Sample:
    """One of a request's n sequences: its request, its text so far and what was already delivered of it."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer | None) -> None:
        self.index = index
        self.request = request
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer, request.params)
        self._num_read = 0  # output tokens given to the detokeniser
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        self._num_delivered = 0  # output tokens that were in an output
        self._ended = False
        self._end_delivered = False

    def advance(self) -> StopMatch | None:
        """Read the request's new tokens; the stop string they complete, if any. Call once more after an abort."""
        request = self.request
        if self._ended:
            return None
        new = request.output_ids[self._num_read :]
        self._num_read += len(new)
        self._add_logprobs(request, len(new))
        self._ended = request.finished
        at_stop = bool(new) and request.finish_reason == FinishReason.STOP and request.ends_with(new[-1])
        return self._detokenizer.push(new, ended=request.finished, hide_last=at_stop)

    def stop_at(self, match: StopMatch) -> None:
        """Settle the request's stop reason after a match; it may already have ended at a stop token or by length."""
        self.request.finish_reason = FinishReason.STOP
        self.request.stop_reason = match.stop
        self._ended = True

    def fail(self, error: Exception) -> None:
        """End with "error" whatever the request's state; tokens and text so far stay."""
        self.request.finish_reason, self.request.stop_reason = FinishReason.ERROR, None
        self.request.error = described(error)
        self._ended = True
        if self.request.params.wants_logprobs:
            self._num_read = len(self._logprobs)

    def drop_text(self) -> None:
        """Show no text any more: making it failed."""
        self._detokenizer = Detokenizer(None, self.request.params)

    def is_due(self, interval: int) -> bool:
        """Whether an output is due: with the first token, every interval tokens, and at the end."""
        new = self._num_read - self._num_delivered
        return self._ended > self._end_delivered or new >= interval or (new > 0 and not self._num_delivered)

    def completion(self, kind: RequestOutputKind) -> CompletionOutput:
        """What is known, or with DELTA what is new since the last call."""
        request = self.request
        start = self._num_delivered if kind == RequestOutputKind.DELTA else 0
        self._num_delivered, self._end_delivered = self._num_read, self._ended
        wants = request.params.wants_logprobs
        return CompletionOutput(
            index=self.index,
            text=self._detokenizer.take_delta() if kind == RequestOutputKind.DELTA else self._detokenizer.text,
            token_ids=request.output_ids[start : self._num_read],
            cumulative_logprob=self._cumulative if wants else None,
            logprobs=self._logprobs[start:] if wants else None,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=request.error,
        )

    def _add_logprobs(self, request: Request, count: int) -> None:
        if not request.params.wants_logprobs or not count:
            return
        for token, found in zip(request.output_ids[-count:], request.logprobs[-count:], strict=True):
            assert found is not None, "a request with logprobs got a token without"
            self._logprobs.append(self._entries(token, found))
            self._cumulative += found.sampled_logprob

    def _entries(self, token: int, found: TokenLogprobs) -> dict[int, Logprob]:
        """The sampled token first, then the best ones, each once with its true rank; or the ids the request named."""
        entries = {token: self._logprob(token, found.sampled_logprob, found.sampled_rank)}
        for rank, (top, logprob) in enumerate(zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True), 1):
            entries.setdefault(top, self._logprob(top, logprob, rank if found.ranked else None))
        return entries

    def _logprob(self, token: int, logprob: float, rank: int | None) -> Logprob:
        text = self._tokenizer.token_text(token) if self._tokenizer is not None else ""
        return Logprob(logprob=logprob, rank=rank, decoded_token=text)


class RequestGroup:
    """A caller's request: its prompt and its n samples."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        requests: Sequence[Request],
        tokenizer: Tokenizer | None,
        stream_interval: int,
    ) -> None:
        self.request_id = request_id
        self.samples = tuple(Sample(index, request, tokenizer) for index, request in enumerate(requests))
        self._prompt = prompt
        self._prompt_ids = list(requests[0].prompt_ids)  # one list for all outputs
        self._kind = params.output_kind
        self._interval = max(stream_interval, params.stream_interval or 1)
        self._tokenizer = tokenizer
        self._prompt_logprobs: PromptLogprobs | None = None
        self._arrival = time.monotonic()
        self._first_token: float | None = None

    @property
    def finished(self) -> bool:
        return all(sample.request.finished for sample in self.samples)

    def output(self) -> RequestOutput | None:
        """The request's output now; None while none is due."""
        if self._first_token is None and any(sample.request.output_ids for sample in self.samples):
            self._first_token = time.monotonic()
        finished = self.finished
        if not finished and (self._kind == RequestOutputKind.FINAL_ONLY or not self._is_due()):
            return None
        first = self.samples[0].request
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=self._take_prompt_logprobs(first),
            outputs=[sample.completion(self._kind) for sample in self.samples],
            finished=finished,
            num_cached_tokens=first.num_cached,
            metrics=RequestMetrics(
                arrival_time=self._arrival,
                first_token_time=self._first_token,
                finished_time=time.monotonic() if finished else None,
            ),
            reading=None if first.generates or not finished else complete_reading(first),
        )

    def _is_due(self) -> bool:
        return self._interval == 1 or any(sample.is_due(self._interval) for sample in self.samples)

    def _take_prompt_logprobs(self, first: Request) -> PromptLogprobs | None:
        """They are made once; of a stream's outputs the first has them, of others each."""
        if self._prompt_logprobs is None and first.params.prompt_logprobs is not None:
            self._prompt_logprobs = prompt_logprobs(first.prompt_ids, first.readings, self._tokenizer)
            return self._prompt_logprobs
        return None if self._kind == RequestOutputKind.DELTA else self._prompt_logprobs
