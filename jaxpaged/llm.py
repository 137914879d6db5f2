"""LLM: the synchronous front end, as a vLLM user knows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from typing import Any, cast

from tqdm import tqdm

from jaxpaged.admission import Ticket
from jaxpaged.beam_output import beam_output
from jaxpaged.beam_params import BeamSearchOutput, BeamSearchParams
from jaxpaged.config import EngineConfig
from jaxpaged.driver import Driver
from jaxpaged.engine import Engine
from jaxpaged.intake import ChatOptions, Intake, ranks
from jaxpaged.keywords import reject_unknown_keywords
from jaxpaged.outputs import ContinuationScore, EmbeddingRequestOutput, RequestOutput
from jaxpaged.prompt_reader import PromptReader
from jaxpaged.prompts import ChatMessage, Prompt, Tokenized, is_conversation, prompts_of
from jaxpaged.sampling_params import RequestOutputKind, SamplingParams
from jaxpaged.tokenizer import Tokenizer


class LLM:
    """A model ready to generate. LLM(model, **options): the options are EngineConfig's fields.

    Raises: TypeError for an unknown option, ValueError for a bad one or a checkpoint that cannot be served.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine = Engine(EngineConfig.create(model, **options))
        self._intake = Intake(self.engine)
        self._driver = Driver(self.engine)
        self._reader = PromptReader(self._intake, self._driver)

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
        return self._run(self._intake.prompts(prompts), sampling_params, use_tqdm, priority)

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
        options = ChatOptions(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._run(self._intake.chats(messages, options), sampling_params, use_tqdm, None)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[BeamSearchOutput]:
        """The most probable continuations of every prompt, by beam search; results in input order.

        Raises: ValueError as generate(), and for a beam_width beyond what the engine's max_num_seqs or max_logprobs
        allow.
        """
        if not isinstance(params, BeamSearchParams):
            raise ValueError(f"params: wanted BeamSearchParams, got {params!r}")
        tokenized = self._intake.prompts(prompts)
        tickets, order = self._intake.tickets(tokenized, params), ranks(priority, len(tokenized))
        with tqdm(total=len(tickets), desc="searches", disable=not use_tqdm) as bar:
            outputs = self._driver.run(tickets, order, bar.update)
        return [beam_output(output, params, self.engine.tokenizer) for output in outputs]

    def generate_stream(
        self, prompt: Prompt | Sequence[ChatMessage], sampling_params: SamplingParams | None = None
    ) -> Generator[RequestOutput]:
        """Yield one request's outputs as they come, each with the new text and ids only (kind DELTA).

        A list of messages is answered as by chat(). Closing the iterator aborts the request. Several streams may be
        open at once, and other calls may be made between their outputs.
        Raises: ValueError as generate(), before the iterator is returned.
        """
        if is_conversation(prompt):
            tokenized = self._intake.chats(cast(Sequence[ChatMessage], prompt), ChatOptions())
        else:
            tokenized = [self._intake.prompt(cast(Prompt, prompt))]
        params = self._intake.params(sampling_params, 1, RequestOutputKind.DELTA)
        (ticket,) = self._intake.tickets(tokenized, params)
        return self._driver.stream(ticket)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """Queue what generate() would run, and return the requests' ids at once; wait() gives the outputs.

        Requests are computed while some call steps the engine: wait(), generate(), a stream.
        Raises: ValueError as generate(), queueing nothing.
        """
        return self._enqueue(self._intake.prompts(prompts), sampling_params, priority)

    def enqueue_chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        **options: Any,
    ) -> list[str]:
        """Queue what chat() would run, see enqueue(); options are chat()'s, as chat_template or tools."""
        reject_unknown_keywords("LLM.enqueue_chat", options, (field.name for field in dataclasses.fields(ChatOptions)))
        return self._enqueue(self._intake.chats(messages, ChatOptions(**options)), sampling_params, priority)

    def wait(self, request_ids: str | Sequence[str], *, use_tqdm: bool = True) -> list[RequestOutput]:
        """The outputs of enqueued requests, in the order of the ids; each is given once.

        After Ctrl-C the requests stay queued, and wait() may be called again.
        Raises: ValueError for an id that enqueue() did not give or that was waited for already.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        with tqdm(total=len(ids), desc="requests", disable=not use_tqdm) as bar:
            return self._driver.wait(ids, bar.update)

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """wait() for all requests that are enqueued, in the order in which they were."""
        return self.wait(self._driver.enqueued, use_tqdm=use_tqdm)

    def abort(self, request_ids: str | Sequence[str]) -> None:
        """End enqueued requests; wait() gives what they have, with finish reason "abort". Others are ignored."""
        self._driver.abort([request_ids] if isinstance(request_ids, str) else request_ids)

    def score_continuations(
        self, contexts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt], *, use_tqdm: bool = True
    ) -> list[ContinuationScore]:
        """Log-likelihoods of given continuations; nothing is generated. Results in input order.

        Args:
            contexts: one for all continuations, or one for each. Their beginnings are read from the prefix cache.
            continuations: texts, or token ids where the contexts are token ids.
            use_tqdm: show progress.

        Raises: ValueError naming the pair that is refused.
        """
        given, wanted = prompts_of(contexts), prompts_of(continuations)
        if len(given) == 1:
            given *= len(wanted)
        if len(given) != len(wanted):
            raise ValueError(f"contexts: wanted one, or one for each of {len(wanted)} continuations, got {len(given)}")
        with tqdm(total=len(wanted), desc="continuations", disable=not use_tqdm) as bar:
            return self._reader.score(given, wanted, bar.update)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, out of the final hidden states; results in input order.

        Args:
            prompts: as for generate(); up to max_model_len tokens each.
            pooling: "last", the last token's state, or "mean", the mean over all tokens.
            normalize: scale to length 1.
            use_tqdm: show progress.

        Raises: ValueError naming the prompt that is refused.
        """
        given = prompts_of(prompts)
        with tqdm(total=len(given), desc="prompts", disable=not use_tqdm) as bar:
            return self._reader.embed(given, pooling, normalize, bar.update)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises ValueError with skip_tokenizer_init=True."""
        return self._intake.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, over SamplingParams' own defaults."""
        return self._intake.recommended()

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while requests run."""
        return self.engine.reset_prefix_cache()

    def model_state(self) -> tuple[Any, Any]:
        """(graphdef, state) of the model, as nnx.split gives them: nnx.merge(*llm.model_state()) is its module.

        The state holds the engine's own arrays. Do not donate them to a computation.
        """
        return self.engine.weights.split()

    def update_weights(self, weights: Any) -> None:
        """Take other weights: an nnx module or state, or a pytree with the names, shapes and dtypes of model_state().

        Arrays that are laid out as the engine's are shared, not copied: donate them only to what makes the next
        update's. The prefix cache is emptied. Raises: ValueError listing what does not fit, RuntimeError while
        requests run; in both cases nothing is changed.
        """
        self.engine.weights.update(weights)

    def sleep(self, level: int = 1) -> None:
        """Free the devices' memory: drop the KV cache and move the weights to the host (1) or drop them (2).

        Raises: RuntimeError while requests run.
        """
        self.engine.weights.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Undo sleep(), all of it or "weights" or "kv_cache" alone. After level 2, call update_weights() first."""
        self.engine.weights.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are off the devices; requests are refused then."""
        return bool(self.engine.weights.asleep)

    def close(self) -> None:
        """Done with it: a process that ends right after a warm start need not wait for programs still being read."""
        self.engine.close()

    def stats(self) -> dict[str, Any]:
        """Counters and gauges, see Engine.stats."""
        return self.engine.stats()

    def _run(
        self,
        prompts: Sequence[Tokenized],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        tickets, order = self._checked(prompts, sampling_params, priority)
        with tqdm(total=len(tickets), desc="requests", disable=not use_tqdm) as bar:
            return self._driver.run(tickets, order, bar.update)

    def _enqueue(
        self,
        prompts: Sequence[Tokenized],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[str]:
        return self._driver.enqueue(*self._checked(prompts, sampling_params, priority))

    def _checked(
        self,
        prompts: Sequence[Tokenized],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> tuple[list[Ticket], list[int]]:
        """A ticket and a rank for each prompt: all are checked before the first is queued."""
        params = self._intake.params(sampling_params, len(prompts), RequestOutputKind.FINAL_ONLY)
        order = ranks(priority, len(prompts))
        return self._intake.tickets(prompts, params), order
