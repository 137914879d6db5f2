"""A beam search's result under vLLM's names, from the engine's RequestOutput."""

from __future__ import annotations

from jaxpaged.beam_params import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
from jaxpaged.outputs import CompletionOutput, RequestOutput
from jaxpaged.tokenizer import Tokenizer


def beam_output(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """The hypotheses as sequences of prompt and output."""
    return BeamSearchOutput(
        sequences=[_sequence(output.prompt_token_ids, completion, params, tokenizer) for completion in output.outputs]
    )


def _sequence(
    prompt_ids: list[int], completion: CompletionOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchSequence:
    total, ids = completion.cumulative_logprob, completion.token_ids
    assert total is not None and completion.logprobs is not None, "a hypothesis has log-probabilities"
    before = _text_before(prompt_ids, ids, params, tokenizer) if tokenizer is not None else ""
    return BeamSearchSequence(
        tokens=[*prompt_ids, *ids],
        text=before + completion.text,
        token_ids=ids,
        output_text=completion.text,
        cum_logprob=total,
        score=params.score(total, max(1, len(ids))),
        logprobs=completion.logprobs,
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        error=completion.error,
    )


def _text_before(prompt_ids: list[int], ids: list[int], params: BeamSearchParams, tokenizer: Tokenizer) -> str:
    """The prompt's text as it stands before the output's.

    Some tokenizers drop a space at the beginning of a text: then the output alone lacks what the whole text has.
    """
    skip = params.skip_special_tokens
    whole, end = (tokenizer.decode(part, skip_special_tokens=skip) for part in ([*prompt_ids, *ids], ids))
    return whole.removesuffix(end) if whole.endswith(end) else tokenizer.decode(prompt_ids, skip_special_tokens=skip)
