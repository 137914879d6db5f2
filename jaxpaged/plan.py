"""What one engine step has to do, as plain data: the seam between the scheduler and the device.

A StepPlan holds numpy arrays and Python values only, so that a run can be recorded and replayed.
Letters: R rows (sequences in the step), P blocks per row, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxpaged.request import Request


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """One sequence's share of a step: positions [start, start + count) are computed.

    Example: a prompt of 10 tokens with 4 already computed and a chunk of 3: start 4, count 3,
    tokens = prompt[4:7], samples False. Its decode step after that: start 10, count 1, samples True.
    """

    request: Request
    slot: int  # index of the row in the block table and in the device's last-token array
    start: int
    count: int
    tokens: np.ndarray  # int32[count]; the last entry is 0 and meaningless if token_on_device
    token_on_device: bool  # run-ahead: the last input token is still on the device, in last_tokens[slot]
    samples: bool  # True when the row reaches its newest token, so its next token is sampled
    read: range = range(0)  # positions among these whose hidden states are read, see Request.readout

    @property
    def kv_len(self) -> int:
        """Tokens of the sequence in the KV cache once this step has run."""
        return self.start + self.count


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step. Rows with count 1 come first, ordered by kv_len (longest first); prefill chunks follow."""

    step: int
    rows: tuple[RowPlan, ...]
    block_tables: np.ndarray  # int32[slots, P], indexed by slot; unused entries are 0, the trash block
    copies: tuple[tuple[int, int], ...]  # (source block, target block): copy-on-write, done before the step
    preempted: tuple[str, ...]  # request ids preempted while this plan was made

    @property
    def num_tokens(self) -> int:
        """Tokens the step computes, padding not counted."""
        return sum(row.count for row in self.rows)

    @property
    def awaits_tokens(self) -> bool:
        """Whether what a row may sample depends on a token that the host does not know yet, or it may jump ahead."""
        return any(
            row.samples and row.request.constraint is not None and (row.token_on_device or row.request.jumps_ahead)
            for row in self.rows
        )

    @property
    def reading_rows(self) -> tuple[RowPlan, ...]:
        """The rows with positions to read, in the order in which their hidden states are kept: scored ones first."""
        rows = [row for row in self.rows if row.read]
        return tuple(sorted(rows, key=lambda row: row.request.readout is None or not row.request.readout.scores))


@dataclass(frozen=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one position: ids int[k], logprobs float[k]; and the sampled token's own."""

    top_ids: np.ndarray  # the most probable ids, best first; or the ids that the request named, in its order
    top_logprobs: np.ndarray
    ranked: bool  # whether they are the most probable ones
    sampled_logprob: float
    sampled_rank: int  # 1 is the most probable token of the vocabulary


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a step read off n consecutive positions of a prompt: scores of the tokens that follow, or a sum of states.

    A readout of scores has logprobs float32[n], ranks int32[n], top_ids int32[n, k] and top_logprobs float32[n, k];
    one of embeddings has state_sum float64[D], the sum of the n final hidden states.
    """

    count: int  # n
    logprobs: np.ndarray | None = None
    ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    state_sum: np.ndarray | None = None
    failed: bool = False  # something was not finite: the numbers are meaningless


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What the device sampled for the plan's sampling rows, in the plan's row order."""

    step: int
    token_ids: np.ndarray  # int32[number of rows with samples=True]
    logprobs: tuple[TokenLogprobs | None, ...]  # per sampling row; None where the request asked for none
    # Position (in token_ids) of a row that failed, whose token is meaningless, and what went wrong.
    failed: Mapping[int, str] = field(default_factory=dict)
    readings: tuple[Reading, ...] = ()  # of the plan's reading_rows, in their order
