"""From prompts to ids and from ids to text, piece by piece."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from viasd.errors import InvalidInput

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]

INCOMPLETE = "\ufffd"  # what a decoder shows for a character whose bytes are not all there yet


def is_batch(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a list of prompts rather than one of ids or of chat messages."""
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], (str, list, tuple))


def encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Text, chat messages or ids -> ids.

    Raises:
        InvalidInput: something else, or text without a tokenizer.
    """
    if isinstance(prompt, str):
        return list(_needed(tokenizer)(prompt)["input_ids"]) if prompt else []
    if isinstance(prompt, (bytes, Mapping)) or not isinstance(prompt, Iterable):
        raise InvalidInput(f"prompt must be text, ids or chat messages, got {type(prompt).__name__}")
    items: list[Any] = list(prompt)
    if items and all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in items):
        if not getattr(_needed(tokenizer), "chat_template", None):
            raise InvalidInput("prompt: the tokenizer has no chat template; pass text or ids")
        text = tokenizer.apply_chat_template(items, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    wrong = [item for item in items if isinstance(item, bool) or not hasattr(item, "__index__")]
    if wrong:
        raise InvalidInput(
            "prompt must be text, ids (integers) or chat messages (with 'role' and 'content'), "
            f"got a list with {type(wrong[0]).__name__}"
        )
    return [operator.index(item) for item in items]


def _needed(tokenizer: Any) -> Any:
    if tokenizer is None:
        raise InvalidInput("prompt: text and chat messages need a tokenizer; this model has none, pass ids")
    return tokenizer


class Detokenizer:
    """Text as tokens arrive; a character that spans several tokens comes with its last one."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._given = 0  # characters of the window that are given away
        self._window = 0  # the window's first token; earlier text cannot change any more
        self._read = 0

    def push(self, token: int) -> str:
        """The text that this token completes."""
        self._tokens.append(token)
        text = self._text()
        if text.endswith(INCOMPLETE):
            return ""
        new = text[self._given :]
        if new:
            # The next window starts with these tokens: some tokenizers decode a token differently at the beginning.
            self._window, self._read = self._read, len(self._tokens)
            self._given = len(self._text())
        return new

    def flush(self) -> str:
        """What is left at the end, an unfinished character included."""
        return self._text()[self._given :]

    def _text(self) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(self._tokens[self._window :], skip_special_tokens=True))
