"""From prompts to ids and from ids to text, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from viasd.errors import InvalidInput

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]

INCOMPLETE = "\ufffd"  # what a decoder shows for a character whose bytes are not all there yet


def is_batch(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a list of prompts rather than one of ids or of chat messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], (str, list, tuple))


def encode(prompt: Prompt, tokenizer: Any, vocab_size: int, max_positions: int) -> list[int]:
    """Text, chat messages or ids -> ids that the model can start from.

    Raises:
        InvalidInput: empty, too long for the context, ids out of range, or text without a tokenizer.
    """
    ids = _ids(prompt, tokenizer)
    if not ids:
        raise InvalidInput("prompt is empty; at least one token is needed")
    if len(ids) >= max_positions:
        raise InvalidInput(f"prompt has {len(ids)} tokens; the model's context holds {max_positions}, output included")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise InvalidInput(f"prompt: ids must lie in [0, {vocab_size}), got {outside[0]}")
    return ids


def _ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    if not isinstance(prompt, str):
        items = list(prompt)
        ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
        if len(ids) == len(items):
            return ids
        if not all(isinstance(item, Mapping) and {"role", "content"} <= item.keys() for item in items):
            raise InvalidInput(
                "prompt must be text, ids (integers) or chat messages (with 'role' and 'content'), "
                f"got a list with {next(type(item).__name__ for item in items if type(item) is not int)}"
            )
    if tokenizer is None:
        raise InvalidInput("prompt: text and chat messages need a tokenizer; this model has none, pass ids")
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"]) if prompt else []
    if not getattr(tokenizer, "chat_template", None):
        raise InvalidInput("prompt: the tokenizer has no chat template; pass text or ids")
    text = tokenizer.apply_chat_template(items, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


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
