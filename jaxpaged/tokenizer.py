"""Text to token ids and back, and chat messages to text, for a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, final

import tokenizers

Message = Mapping[str, Any]


@contextmanager
def _without_torch_notice() -> Iterator[None]:
    """transformers says on import that it found no PyTorch; here that is as intended."""
    logger = logging.getLogger("transformers")

    def wanted(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


@final
class Tokenizer:
    """A vocabulary with its special tokens and chat template. Immutable; safe to share between threads.

    Attributes:
      backend: the `tokenizers.Tokenizer` that does the work.
      bos_id: id of the begin-of-sequence token, None when there is none.
      eos_ids: ids after which generation ends, as far as the tokenizer knows (may be empty).
      added_tokens: by id, the texts of the tokens that stand beside the vocabulary, special ones and others.
      special_ids: those of them that decode(skip_special_tokens=True) leaves out.
      adds_bos: whether encode(add_special_tokens=True) puts bos_id in front.
      vocab_size: number of tokens, added ones included. The model's embedding may be larger or smaller.

    encode and decode need the `tokenizers` package alone. transformers (most of a second to import) is imported by
    from_directory, and by apply_chat_template when first called.
    """

    def __init__(
        self,
        *,
        backend: tokenizers.Tokenizer,
        bos_id: int | None,
        eos_ids: frozenset[int],
        special_tokens: Mapping[str, str],
        chat_template: str | dict[str, str] | None,
        chat_tokenizer: Any | None,
    ) -> None:
        """Prefer from_directory and from_gguf.

        chat_tokenizer: the transformers tokenizer that renders templates; None: made when first needed.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.adds_bos = bos_id is not None and bos_id in backend.encode("", add_special_tokens=True).ids[:1]
        self._special_tokens = special_tokens
        self._chat_template = chat_template
        self._chat_tokenizer = chat_tokenizer

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Load what AutoTokenizer would from a local directory (network and remote code are never used).

        Raises ValueError when there is no tokenizer in it, or only one without a fast implementation.
        """
        with _without_torch_notice():
            from transformers import AutoTokenizer, PreTrainedTokenizerFast
        path = Path(path)
        if not path.is_dir():
            raise ValueError(f"{path} is not a directory: give the directory that holds tokenizer.json")
        try:
            loaded = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"no tokenizer could be loaded from {path} (is tokenizer.json there?): {error}") from error
        if not isinstance(loaded, PreTrainedTokenizerFast):
            raise ValueError(f"{path} holds a {type(loaded).__name__}, which has no tokenizer.json form: convert it")
        bos, eos = loaded.bos_token_id, loaded.eos_token_id
        return cls(
            backend=loaded.backend_tokenizer,
            bos_id=bos if isinstance(bos, int) else None,
            eos_ids=frozenset([eos] if isinstance(eos, int) else []),
            special_tokens=loaded.special_tokens_map,
            chat_template=loaded.chat_template,
            chat_tokenizer=loaded,
        )

    @classmethod
    def from_gguf(cls, path: str | os.PathLike[str]) -> Self:
        """Build the tokenizer that a GGUF file describes.

        Raises ValueError for a broken file or a kind of tokenizer that is not supported.
        """
        from jaxpaged.gguf_file import read_gguf
        from jaxpaged.gguf_tokenizer import build_tokenizer

        file = read_gguf(path)
        built = build_tokenizer(file.path, file.metadata)
        return cls(
            backend=built.backend,
            bos_id=built.bos_id,
            eos_ids=built.end_ids,
            special_tokens=built.special_tokens,
            chat_template=built.chat_template,
            chat_tokenizer=None,
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of text; add_special_tokens puts in what the tokenizer adds by itself (BOS, sometimes EOS).

        Text that a chat template rendered has its special tokens already: encode it with False.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of token ids. Ids without an entry give nothing; bytes that are no UTF-8 give U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token taken alone, '' for an id without an entry."""
        return self.decode([token_id], skip_special_tokens=False)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: str | None,
        tools: Sequence[Mapping[str, Any]] | None,
        **kwargs: Any,
    ) -> str:
        """The prompt for messages [{"role": …, "content": …}, …], exactly as transformers renders it.

        chat_template: a Jinja template, or the name of one of the tokenizer's own; None for its default.
        kwargs go to the template. Raises ValueError when there is no template or it refuses the messages.
        """
        import jinja2

        renderer = self._renderer()
        try:
            return renderer.apply_chat_template(
                list(messages),
                tools=None if tools is None else list(tools),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **kwargs,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error

    def _renderer(self) -> Any:
        """The transformers object whose templates are used; a template sees only the special tokens' texts."""
        if self._chat_tokenizer is None:
            with _without_torch_notice():
                from transformers import PreTrainedTokenizerFast

            self._chat_tokenizer = PreTrainedTokenizerFast(
                tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()),
                chat_template=self._chat_template,
                **self._special_tokens,
            )
        return self._chat_tokenizer
