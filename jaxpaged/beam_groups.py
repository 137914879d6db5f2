"""Beam searches in the engine: each follows its hypotheses as forked requests of one scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable, Sequence

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.beam_search import BeamSearch, Ending, Finished, Survivor
from jaxpaged.detokenizer import Detokenizer
from jaxpaged.output_builder import RequestMetrics
from jaxpaged.outputs import CompletionOutput, Logprob, RequestOutput
from jaxpaged.request import FinishReason, Request, described
from jaxpaged.scheduler import Scheduler
from jaxpaged.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class BeamGroup:
    """One search: _beams[i] is the request whose tokens are those of _search.beams[i]."""

    def __init__(
        self,
        root: Request,
        prompt: str | None,
        params: BeamSearchParams,
        *,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        owners: dict[Request, BeamGroup],
    ) -> None:
        """owners: the group of every unfinished beam; each group keeps its own part."""
        self.request_id = root.request_id
        self.members = {root}  # unfinished beams
        self._beams: list[Request] = [root]
        self._root, self._prompt = root, prompt
        self._scheduler, self._tokenizer, self._owners = scheduler, tokenizer, owners
        owners[root] = self
        self._search = BeamSearch(params, root.max_tokens)
        self._texts = [self._detokenizer()] if params.stop else []  # of the beams, where stop strings are looked for
        self._num_made = 0
        self._error: str | None = None
        self._arrival = time.monotonic()
        self._first_token: float | None = None

    @property
    def finished(self) -> bool:
        return self._search.over

    def advance(self) -> None:
        """Once all beams are answered: those that go on get their tokens, forks are made, the others leave."""
        errors = [beam.error or "" for beam in self._beams if beam.finished]
        if errors:
            self.fail(errors[0])
            return
        answers = [beam.answer for beam in self._beams if beam.answer is not None]
        if len(answers) < len(self._beams):
            return
        if self._first_token is None:
            self._first_token = time.monotonic()
        self._follow(self._search.advance(answers, self._ending))

    def abort(self) -> None:
        """End the search with what it has."""
        self._search.cut(FinishReason.ABORT)
        self._dismiss(self.members, FinishReason.ABORT)

    def fail(self, error: str) -> None:
        """End the search with "error"; nothing that its beams have computed is used again."""
        self._error = error
        self._search.cut(FinishReason.ERROR)
        self._dismiss(self.members, FinishReason.ERROR)

    def output(self) -> RequestOutput:
        """The hypotheses, best first, as the outputs of one request."""
        found = self._search.finished
        outputs = [self._completion(index, finished) for index, finished in enumerate(found)]
        if not outputs:  # ended before the first token
            reason = FinishReason.ABORT if self._error is None else FinishReason.ERROR
            outputs = [
                CompletionOutput(
                    index=0,
                    text="",
                    token_ids=[],
                    cumulative_logprob=0.0,
                    logprobs=[],
                    finish_reason=reason,
                    stop_reason=None,
                    error=self._error,
                )
            ]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self._root.prompt_ids),
            prompt_logprobs=None,
            outputs=outputs,
            finished=True,
            num_cached_tokens=self._root.num_cached,
            metrics=RequestMetrics(
                arrival_time=self._arrival, first_token_time=self._first_token, finished_time=time.monotonic()
            ),
        )

    def _follow(self, survivors: Sequence[Survivor]) -> None:
        """The first of a beam's continuations goes on as the same request, each further one as a fork of it."""
        going_on = {survivor.beam for survivor in survivors}
        dropped = [beam for index, beam in enumerate(self._beams) if index not in going_on]
        self._dismiss(dropped, FinishReason.ABORT)  # first: forks can have their slots
        beams: list[Request] = []
        same: list[tuple[Request, int]] = []
        for survivor in survivors:
            parent, token = self._beams[survivor.beam], survivor.hypothesis.token
            if survivor.beam in going_on:
                going_on.remove(survivor.beam)
                same.append((parent, token))
                beams.append(parent)
            else:
                beams.append(self._fork(parent, token))
        for beam, token in same:
            self._scheduler.extend(beam, token)
        if self._texts:
            self._texts = [self._text_after(survivor) for survivor in survivors]
        self._beams = beams

    def _fork(self, parent: Request, token: int) -> Request:
        self._num_made += 1
        child = parent.forked(f"{self.request_id}#beam{self._num_made}", token)
        self.members.add(child)
        self._owners[child] = self
        self._scheduler.fork(parent, child)
        return child

    def _dismiss(self, beams: Iterable[Request], reason: FinishReason) -> None:
        for beam in tuple(beams):
            self._scheduler.finish(beam, reason, None)
            self.members.remove(beam)
            del self._owners[beam]

    def _ending(self, beam: int, token: int) -> Ending | None:
        """Whether the token ends the beam."""
        if token in self._root.eos_ids:
            return FinishReason.STOP, None
        if token in self._root.stop_ids:
            return FinishReason.STOP, token
        if not self._texts:
            return None
        match = self._texts[beam].fork().push([token], ended=False)
        return None if match is None else (FinishReason.STOP, match.stop)

    def _text_after(self, survivor: Survivor) -> Detokenizer:
        text = self._texts[survivor.beam].fork()
        text.push([survivor.hypothesis.token], ended=False)
        return text

    def _detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer, self._root.params)

    def _completion(self, index: int, finished: Finished) -> CompletionOutput:
        path = finished.hypothesis.path()
        ids = [node.token for node in path]
        text, reason, stop_reason = self._detokenizer(), finished.reason, finished.stop_reason
        by_token = reason == FinishReason.STOP and not isinstance(stop_reason, str)
        match = text.push(ids, ended=True, hide_last=by_token)
        if match is not None:  # also a stop token that is written as a stop string, and one seen at the very end
            reason, stop_reason = FinishReason.STOP, match.stop
        name = self._tokenizer.token_text if self._tokenizer is not None else lambda token: ""
        return CompletionOutput(
            index=index,
            text=text.text,
            token_ids=ids,
            cumulative_logprob=finished.hypothesis.total,
            logprobs=[
                {node.token: Logprob(logprob=node.logprob, rank=node.rank, decoded_token=name(node.token))}
                for node in path
            ],
            finish_reason=reason,
            stop_reason=stop_reason,
            error=self._error if reason == FinishReason.ERROR else None,
        )


class BeamSearches:
    """All searches of an engine, by request id. Only the final output of each is given."""

    def __init__(self, scheduler: Scheduler, tokenizer: Tokenizer | None) -> None:
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self._groups: dict[str, BeamGroup] = {}
        self._owners: dict[Request, BeamGroup] = {}  # by beam

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._groups

    def submit(self, root: Request, prompt: str | None, params: BeamSearchParams) -> None:
        """Queue a search; root becomes its first beam. Raises ValueError for an id that is in use."""
        self._scheduler.add(root)
        self._groups[root.request_id] = BeamGroup(
            root, prompt, params, scheduler=self._scheduler, tokenizer=self._tokenizer, owners=self._owners
        )

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a search; its blocks are free at once. None if there is no such search."""
        group = self._groups.get(request_id)
        if group is None:
            return None
        group.abort()
        return self._report(group)

    def deliver(self, updated: Sequence[Request]) -> list[RequestOutput]:
        """Let the searches whose beams were answered or failed go on; the outputs of those that are over."""
        outputs: list[RequestOutput] = []
        for group in dict.fromkeys(self._owners[beam] for beam in updated if beam.lockstep):
            try:
                group.advance()
            except Exception as error:
                logger.exception("request %s: its beams could not go on", group.request_id)
                group.fail(described(error))
            if group.finished:
                outputs.append(self._report(group))
        return outputs

    def fail(self, suspects: Container[str] | None, error: Exception) -> list[RequestOutput]:
        """End the searches that have one of these requests (None: every one) with "error"; their outputs."""
        outputs: list[RequestOutput] = []
        for group in tuple(self._groups.values()):
            if suspects is None or any(beam.request_id in suspects for beam in group.members):
                group.fail(described(error))
                outputs.append(self._report(group))
        return outputs

    def _report(self, group: BeamGroup) -> RequestOutput:
        del self._groups[group.request_id]
        return group.output()
