"""The beam search of one prompt: which hypotheses go on and which have ended, from log-probabilities alone."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jaxpaged.beam_params import BeamSearchParams
from jaxpaged.plan import TokenLogprobs
from jaxpaged.request import FinishReason

type Ending = tuple[FinishReason, int | str | None]  # finish reason and stop reason


@dataclass(frozen=True, kw_only=True, eq=False)
class Hypothesis:
    """A sequence of tokens as its last token and what came before."""

    parent: Hypothesis | None
    token: int
    logprob: float  # of the token
    rank: int  # of the token after its parent; 1 is the most probable
    total: float  # sum of the log-probabilities
    length: int

    def path(self) -> list[Hypothesis]:
        """Itself and its ancestors but for the empty one, oldest first."""
        nodes: list[Hypothesis] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


EMPTY = Hypothesis(parent=None, token=0, logprob=0.0, rank=0, total=0.0, length=0)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A hypothesis that has ended."""

    hypothesis: Hypothesis
    score: float
    reason: FinishReason
    stop_reason: int | str | None


@dataclass(frozen=True, kw_only=True)
class Survivor:
    """A hypothesis that goes on, and which of the beams so far it continues."""

    beam: int
    hypothesis: Hypothesis


class BeamSearch:
    """advance() until over. The rules are those of Hugging Face transformers, for one prompt:

    All continuations of all beams are ranked by their sums. The best beam_width that do not end go on. One that ends
    counts if it is among the first beam_width; of all that count, the beam_width best scores are kept. Of equal sums
    the one of the better beam, then of the more probable token comes first.
    """

    def __init__(self, params: BeamSearchParams, max_tokens: int) -> None:
        """max_tokens: params.max_tokens cut to what the model's length and the cache leave."""
        self._params = params
        self._max_tokens = max_tokens
        self.beams: list[Hypothesis] = [EMPTY]  # best first, all of the same length
        self.finished: list[Finished] = []  # best first
        self.over = False

    def advance(
        self, answers: Sequence[TokenLogprobs], ends: Callable[[int, int], Ending | None]
    ) -> tuple[Survivor, ...]:
        """One token further: what comes after each of the beams decides which there are now; none when it is over.

        ends(beam, token) tells whether that token ends the beam (by anything but its length).
        """
        width, length = self._params.beam_width, self.beams[0].length + 1
        closed = self._params.early_stopping is True and len(self.finished) == width
        survivors: list[Survivor] = []
        for place, (beam, hypothesis) in enumerate(self._candidates(answers)):
            if place >= width and (len(survivors) == width or length == self._max_tokens):
                break
            ending = ends(beam, hypothesis.token)
            if ending is None and length == self._max_tokens:
                ending = FinishReason.LENGTH, None
            if ending is None:
                survivors.append(Survivor(beam=beam, hypothesis=hypothesis))
            elif place < width and not closed:
                self._keep(hypothesis, ending)
        chosen = tuple(survivors[:width])
        self.over = not chosen or self._settled(chosen[0].hypothesis)
        self.beams = [] if self.over else [survivor.hypothesis for survivor in chosen]
        return () if self.over else chosen

    def cut(self, reason: FinishReason) -> None:
        """End the search now: its beams join what has finished, up to beam_width in all."""
        for hypothesis in self.beams:
            if hypothesis.length and len(self.finished) < self._params.beam_width:
                self._keep(hypothesis, (reason, None))
        self.beams, self.over = [], True

    def _candidates(self, answers: Sequence[TokenLogprobs]) -> Iterator[tuple[int, Hypothesis]]:
        """(beam, continuation), the greatest sum first; impossible ones left out."""
        logprobs = np.concatenate([np.asarray(answer.top_logprobs, np.float64) for answer in answers])
        ids = np.concatenate([answer.top_ids for answer in answers])
        counts = [len(answer.top_ids) for answer in answers]
        beams = np.repeat(np.arange(len(counts)), counts)
        ranks = np.concatenate([np.arange(1, count + 1) for count in counts])
        totals = logprobs + np.repeat([beam.total for beam in self.beams], counts)
        for i in np.argsort(-totals, kind="stable").tolist():
            if totals[i] == -np.inf:
                return
            parent = self.beams[beams[i]]
            yield (
                int(beams[i]),
                Hypothesis(
                    parent=parent,
                    token=int(ids[i]),
                    logprob=float(logprobs[i]),
                    rank=int(ranks[i]),
                    total=float(totals[i]),
                    length=parent.length + 1,
                ),
            )

    def _keep(self, hypothesis: Hypothesis, ending: Ending) -> None:
        score = self._params.score(hypothesis.total, hypothesis.length)
        found = Finished(hypothesis=hypothesis, score=score, reason=ending[0], stop_reason=ending[1])
        bisect.insort_right(self.finished, found, key=lambda finished: -finished.score)
        del self.finished[self._params.beam_width :]

    def _settled(self, best: Hypothesis) -> bool:
        """Whether to stop although beams could go on; best is the best of them."""
        if len(self.finished) < self._params.beam_width:
            return False
        if self._params.early_stopping is True:
            return True
        hopeful = self._params.early_stopping == "never" and self._params.length_penalty > 0
        length = self._max_tokens if hopeful else best.length
        return self._params.score(best.total, length) <= self.finished[-1].score
