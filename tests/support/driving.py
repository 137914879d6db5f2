"""Driving an engine in tests: one request streamed or whole, or several that join it at given steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jaxpaged
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams


def greedy(**options: Any) -> SamplingParams:
    """Greedy sampling parameters."""
    return SamplingParams(temperature=0, **options)


def answers(llm: jaxpaged.LLM, prompts: Sequence[Any], params: Any) -> list[CompletionOutput]:
    """The first sample for each prompt, generated in one call."""
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def answer(llm: jaxpaged.LLM, prompt: Any, **options: Any) -> CompletionOutput:
    """The greedy answer to one prompt."""
    return answers(llm, [prompt], greedy(**options))[0]


@dataclass
class Stream:
    """The deltas of a request's first sample, and what they add up to."""

    deltas: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: CompletionOutput | None = None

    def take(self, output: RequestOutput) -> None:
        """Add one output of kind DELTA."""
        assert self.last is None or self.last.finish_reason is None, "an output after the last one"
        self.last = output.outputs[0]
        self.deltas.append(self.last.text)
        self.token_ids += self.last.token_ids

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    @property
    def finish_reason(self) -> str | None:
        assert self.last is not None, "nothing was streamed"
        return self.last.finish_reason


def streamed(llm: jaxpaged.LLM, prompt: Any, **options: Any) -> Stream:
    """The greedy answer to one prompt, streamed."""
    stream = Stream()
    for output in llm.generate_stream(prompt, greedy(**options)):
        stream.take(output)
    return stream


def both_ways(llm: jaxpaged.LLM, prompt: Any, **options: Any) -> Stream:
    """The greedy answer streamed, checked to be the same as the whole one."""
    stream, whole = streamed(llm, prompt, **options), answer(llm, prompt, **options)
    assert stream.text == whole.text
    assert stream.token_ids == whole.token_ids
    assert stream.last is not None
    assert (stream.last.finish_reason, stream.last.stop_reason) == (whole.finish_reason, whole.stop_reason)
    return stream


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request that joins before step number `step` (from 0)."""

    step: int
    name: str
    prompt: Sequence[int]
    params: SamplingParams
    priority: int = 0


def run_arrivals(llm: jaxpaged.LLM, arrivals: Iterable[Arrival]) -> dict[str, Stream]:
    """Stream all requests to their ends, each joining at its step; the books are checked after every step."""
    coming = sorted(arrivals, key=lambda arrival: arrival.step)
    streams = {arrival.name: Stream() for arrival in coming}
    step = 0
    while coming or llm.engine.has_unfinished:
        while coming and coming[0].step <= step:
            join(llm, coming.pop(0))
        advance(llm, streams)
        step += 1
    return streams


def join(llm: jaxpaged.LLM, arrival: Arrival) -> None:
    """Queue the request now, streaming."""
    params = dataclasses.replace(arrival.params, output_kind=RequestOutputKind.DELTA)
    llm.engine.add(arrival.name, arrival.prompt, params, prompt=None, priority=arrival.priority)


def advance(llm: jaxpaged.LLM, streams: Mapping[str, Stream]) -> None:
    """One step of the engine: what it gives goes to the streams, and its books are checked."""
    for output in llm.engine.step():
        streams[output.request_id].take(output)
    llm.engine.check_invariants()


def logprob_rows(completion: CompletionOutput) -> list[Mapping[int, float]]:
    """Per generated token {token id: log-probability} of the sampled token and the alternatives."""
    assert completion.logprobs is not None, "the request asked for no log-probabilities"
    return [{token: entry.logprob for token, entry in row.items()} for row in completion.logprobs]
