"""A model for EleutherAI's lm-evaluation-harness: needs the extra jaxpaged[lm-eval]."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jaxpaged.llm import LLM
from jaxpaged.sampling_params import SamplingParams

type Pair = tuple[tuple[str, str], list[int], list[int]]  # texts, ids of the context, ids of the continuation

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # the first one given counts
_PASSED_ON = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed")
_DEFAULT_LENGTH = 256


class HarnessLM(TemplateLM):
    """lm_eval.simple_evaluate(model=HarnessLM(llm), tasks=[…]): the engine does its own batching.

    Contexts that are too long lose their beginning, as with the harness' own models.
    """

    def __init__(self, llm: LLM, *, use_tqdm: bool = True) -> None:
        """Raises ValueError for an engine without a tokenizer, or whose tokenizer has no end-of-sequence token."""
        super().__init__()
        self._llm, self._use_tqdm = llm, use_tqdm
        self._tokenizer = llm.get_tokenizer()
        if not self._tokenizer.eos_ids:
            raise ValueError("wanted a tokenizer with an end-of-sequence token, got one without")

    @property
    def eot_token_id(self) -> int:
        return min(self._tokenizer.eos_ids)

    @property
    def prefix_token_id(self) -> int:
        """What an empty context is replaced by."""
        return self.eot_token_id if self._tokenizer.bos_id is None else self._tokenizer.bos_id

    @property
    def tokenizer_name(self) -> str:
        return self._llm.engine.config.model.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of a text; a beginning-of-text token that the text has already is not put before it again."""
        ids = self._tokenizer.encode(string, add_special_tokens=add_special_tokens is not False)
        bos = self._tokenizer.bos_id
        return ids[1:] if add_special_tokens is None and bos is not None and ids[:2] == [bos, bos] else ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self._tokenizer.apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            chat_template=None,
            tools=None,
        )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts: windows of the longest length, each token scored once."""
        windows: list[Pair] = []
        owners: list[int] = []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            pieces = get_rolling_token_windows(ids, self.prefix_token_id, self._longest - 1, 1)
            pairs = [(("", ""), *make_disjoint_window(piece)) for piece in pieces]
            windows += pairs
            owners += [owner] * len(pairs)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._scores(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts up to the first of the request's stop strings, which is left out."""
        asked: list[tuple[Any, ...]] = [request.args for request in requests]
        params = [self._params(given) for _, given in asked]
        prompts = [
            self.tok_encode(text)[-(self._longest - (param.max_tokens or 0)) :] or [self.prefix_token_id]
            for (text, _), param in zip(asked, params, strict=True)
        ]
        outputs = self._llm.generate(prompts, params, use_tqdm=self._use_tqdm and not disable_tqdm)
        texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found = self._scores(requests, disable_tqdm)
        for (texts, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def _scores(self, pairs: Sequence[Pair], disable_tqdm: bool) -> list[tuple[float, bool]]:
        contexts, continuations = [], []
        for _, context, continuation in pairs:
            room = self._longest - len(continuation)
            if room < 1:
                raise ValueError(
                    f"a continuation of {len(continuation)} tokens: wanted fewer than max_model_len={self._longest}"
                )
            contexts.append(context[-room:])
            continuations.append(continuation)
        scores = self._llm.score_continuations(contexts, continuations, use_tqdm=self._use_tqdm and not disable_tqdm)
        return [(score.logprob, score.is_greedy) for score in scores]

    @property
    def _longest(self) -> int:
        return self._llm.engine.limits.max_model_len

    def _params(self, given: Mapping[str, Any]) -> SamplingParams:
        """A task's generation_kwargs; greedy unless it samples. Options of other libraries are left out."""
        until = given.get("until") or []
        stop = [text for text in ([until] if isinstance(until, str) else until) if text]
        wanted = next((given[name] for name in _LENGTHS if given.get(name) is not None), _DEFAULT_LENGTH)
        temperature = float(given.get("temperature", 1.0)) if given.get("do_sample", False) else 0.0
        return SamplingParams(
            temperature=temperature,
            max_tokens=max(1, min(int(wanted), self._longest - 1)),
            stop=stop,
            **{name: given[name] for name in _PASSED_ON if given.get(name) is not None},
        )
