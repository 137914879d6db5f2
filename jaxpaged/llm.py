"""LLM: the synchronous front end, as a vLLM user knows it."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Container, Generator, Sequence
from numbers import Integral
from typing import Any, cast

from tqdm import tqdm

from jaxpaged.config import EngineConfig
from jaxpaged.engine import Engine
from jaxpaged.interrupts import undivided
from jaxpaged.outputs import RequestOutput
from jaxpaged.prompts import ChatMessage, Prompt, Tokenized, conversations_of, is_conversation, prompts_of, tokenize
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.tokenizer import Tokenizer


class LLM:
    """A model ready to generate. LLM(model, **options): the options are EngineConfig's fields.

    Raises: TypeError for an unknown option, ValueError for a bad one or a checkpoint that cannot be served.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = Engine(EngineConfig.create(model, **options))
        self._ids = itertools.count()
        self._mail: dict[str, deque[RequestOutput]] = {}  # of open streams: what came while others were stepping

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generate for every prompt; results in input order.

        Args:
            prompts: one or several of: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: for all, or one for each; None: get_default_sampling_params().
            use_tqdm: show progress.
            priority: one for each prompt, lower runs earlier (scheduling_policy="priority").

        Raises: ValueError naming the prompt that is refused; then, and after Ctrl-C, nothing of the call stays queued.
        """
        tokenized = [tokenize(prompt, self.engine.tokenizer) for prompt in prompts_of(prompts)]
        return self._run(tokenized, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's chat template (or the given one).

        The template writes what begins a sequence, so no such token is added a second time.
        Raises: ValueError as generate(), and when there is no template or it refuses the messages.
        """
        tokenized = [
            self._render(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(chat_template_kwargs or {}),
            )
            for conversation in conversations_of(messages)
        ]
        return self._run(tokenized, sampling_params, use_tqdm, None)

    def generate_stream(
        self, prompt: Prompt | Sequence[ChatMessage], sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput]:
        """Yield one request's outputs as they come, each with the new text and ids only (kind DELTA).

        A list of messages is answered as by chat(). Closing the iterator aborts the request. Several streams may be
        open at once, and other calls may be made between their outputs.
        Raises: ValueError as generate(), before the iterator is returned.
        """
        if is_conversation(prompt):
            options = {"chat_template": None, "add_generation_prompt": True, "continue_final_message": False}
            (conversation,) = conversations_of(cast(Sequence[ChatMessage], prompt))
            tokenized = self._render(conversation, tools=None, **options)
        else:
            tokenized = tokenize(cast(Prompt, prompt), self.engine.tokenizer)
        (params,) = self._params(sampling_params, 1, RequestOutputKind.DELTA)
        self._check([tokenized], [params])
        return self._stream(tokenized, params)

    def _stream(self, prompt: Tokenized, params: SamplingParams) -> Generator[RequestOutput]:
        request_id = str(next(self._ids))
        mail = self._mail[request_id] = deque()
        finished = False
        try:
            self._add([request_id], [prompt], [params], [0])
            while not finished and (mail or self.engine.has_unfinished):
                for output in [mail.popleft()] if mail else self._step([request_id]):
                    finished = output.finished
                    yield output
        finally:
            self._abandon([request_id])
            del self._mail[request_id]

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError with skip_tokenizer_init=True."""
        if self.engine.tokenizer is None:
            raise ValueError("this engine has no tokenizer: it was built with skip_tokenizer_init=True")
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, over SamplingParams' own defaults."""
        names = {
            "temperature": "temperature",
            "top_p": "top_p",
            "top_k": "top_k",
            "min_p": "min_p",
            "max_new_tokens": "max_tokens",
        }
        given = self.engine.generation_config
        return SamplingParams(**{ours: given[hf] for hf, ours in names.items() if given.get(hf) is not None})

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests run."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Done with it: a process that ends right after a warm start need not wait for programs still being read."""
        self.engine.close()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, see Engine.stats."""
        return self.engine.stats()

    def _render(self, conversation: Sequence[ChatMessage], **options: Any) -> Tokenized:
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(list(conversation), **options)
        return Tokenized(text=text, ids=tokenizer.encode(text, add_special_tokens=False))

    def _run(
        self,
        prompts: Sequence[Tokenized],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = self._params(sampling_params, len(prompts), RequestOutputKind.FINAL_ONLY)
        ranks = _ranks(priority, len(prompts))
        self._check(prompts, params)
        ids = [str(next(self._ids)) for _ in prompts]
        done: dict[str, RequestOutput] = {}
        try:
            self._add(ids, prompts, params, ranks)
            own = frozenset(ids)
            with tqdm(total=len(ids), desc="requests", disable=not use_tqdm) as bar:
                while len(done) < len(ids):
                    for output in self._step(own):
                        done[output.request_id] = output
                        bar.update()
        finally:
            self._abandon(ids)  # those of an interrupted call; finished ones are unknown and ignored
        return [done[request_id] for request_id in ids]

    def _step(self, own: Container[str]) -> list[RequestOutput]:
        """One engine step: the outputs of the caller's own requests. Those of open streams are kept for them."""
        mine: list[RequestOutput] = []
        with undivided():
            for output in self.engine.step():
                if output.request_id in own:
                    mine.append(output)
                elif output.request_id in self._mail:
                    self._mail[output.request_id].append(output)
        return mine

    def _params(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int, kind: RequestOutputKind
    ) -> list[SamplingParams]:
        """One SamplingParams for each prompt, with the kind of output that the front end wants."""
        params = self.get_default_sampling_params() if given is None else given
        each = [params] * count if isinstance(params, SamplingParams) else params
        if not isinstance(each, Sequence) or not all(isinstance(item, SamplingParams) for item in each):
            raise ValueError(
                f"sampling_params: wanted SamplingParams, or a list with one for each prompt, got {given!r}"
            )
        _check_count("sampling_params", each, count)
        return [dataclasses.replace(item, output_kind=kind) for item in each]

    def _check(self, prompts: Sequence[Tokenized], params: Sequence[SamplingParams]) -> None:
        """All or none are queued, so every request is checked before the first is added."""
        for index, (prompt, param) in enumerate(zip(prompts, params, strict=True)):
            try:
                self.engine.check(prompt.ids, param)
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}" if len(prompts) > 1 else str(error)) from None

    def _add(
        self,
        ids: Sequence[str],
        prompts: Sequence[Tokenized],
        params: Sequence[SamplingParams],
        priority: Sequence[int],
    ) -> None:
        with undivided():
            for request_id, prompt, param, rank in zip(ids, prompts, params, priority, strict=True):
                self.engine.add(request_id, prompt.ids, param, prompt=prompt.text, priority=rank)

    def _abandon(self, ids: Sequence[str]) -> None:
        with undivided():
            for request_id in ids:
                self.engine.abort(request_id)


def _ranks(priority: Sequence[int] | None, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    if not isinstance(priority, Sequence) or not all(isinstance(rank, Integral) for rank in priority):
        raise ValueError(f"priority: wanted a list of integers, one for each prompt, got {priority!r}")
    _check_count("priority", priority, count)
    return list(priority)


def _check_count(name: str, given: Sequence[object], count: int) -> None:
    if len(given) != count:
        raise ValueError(f"{name}: wanted one for each of the {count} prompts, got {len(given)}")
