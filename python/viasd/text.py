"""From prompts to ids and from ids to text, piece by piece."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from viasd.errors import InvalidInput

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]

INCOMPLETE = "\ufffd"  # what a decoder shows for a character whose bytes are not all there yet


def as_lists(prompt: Any) -> Any:
    """A prompt, or a list of them, with tensors and arrays of ids as lists; [B, n] ids are B prompts."""
    if isinstance(prompt, (list, tuple)):
        return [own.tolist() if hasattr(own, "tolist") else own for own in prompt]
    return prompt.tolist() if hasattr(prompt, "tolist") else prompt


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


class StopStrings:
    """Finds where stop strings end an output.

    Args:
        stop: non-empty strings.
        tokenizer: turns tokens into text.

    Raises:
        InvalidInput: no tokenizer.
    """

    def __init__(self, stop: Sequence[str], tokenizer: Any) -> None:
        if tokenizer is None:
            raise InvalidInput("stop: stop strings need a tokenizer; this model has none")
        self._stop = tuple(stop)
        self._tokenizer = tokenizer
        self._longest = max(map(len, stop))

    def ends(self, output: Sequence[int]) -> bool:
        """Whether the newest token of the output, prompt excluded, completes a stop string."""
        # A window of the newest tokens that is sure to hold a whole stop string before the newest token's own text,
        # and some more: characters may span tokens, and some tokenizers decode a token differently at the beginning.
        size = self._longest + 8
        while True:
            window = list(output[-size:])
            before, text = self._decode(window[:-1]), self._decode(window)
            if len(window) == len(output) or len(before) >= self._longest + 4:
                break
            size *= 2
        # What an unfinished character shows as is replaced, so only what both have in common was there before.
        old = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, text, strict=False)))
        return any(stop in text[max(old - len(stop) + 1, 0) :] for stop in self._stop)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


def cut_at(stop: Sequence[str], text: str) -> str:
    """The text before the first stop string; all of it where there is none."""
    return text[: min((found for found in map(text.find, stop) if found >= 0), default=len(text))]


class Detokenizer:
    """Text as tokens arrive; a character that spans several tokens comes with its last one.

    What may be the beginning of a stop string is held back until it is known not to be one, and nothing comes after
    the beginning of a whole one.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._given = 0  # characters of the window that are given away
        self._window = 0  # the window's first token; earlier text cannot change any more
        self._read = 0
        self._stop = tuple(stop)
        self._held = ""
        self._stopped = False

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
        return self._release(new, last=False)

    def flush(self) -> str:
        """What is left at the end, an unfinished character included."""
        return self._release(self._text()[self._given :], last=True)

    def _release(self, new: str, *, last: bool) -> str:
        if not self._stop:
            return new
        text = cut_at(self._stop, self._held + new)
        self._stopped, stopped = self._stopped or len(text) < len(self._held + new), self._stopped
        if stopped:
            return ""
        held = 0 if last or self._stopped else max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def _text(self) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(self._tokens[self._window :], skip_special_tokens=True))


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of ``stop`` that ``text`` ends with."""
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)
