"""Prompt lookup: what followed the longest earlier occurrence of the newest tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from viasd.drafters.base import Draft, DraftContext, Drafter
from viasd.errors import InvalidInput


class PromptLookup(Drafter):
    """Looks the end of prompt and output up in what precedes it, and proposes what followed there. Deterministic.

    Args:
        min_match: shortest match that is worth a draft, in tokens.
        max_match: a match is not followed further back than this; of matches that reach it, the latest is taken.
    """

    name = "prompt-lookup"
    expected_acceptance = (0.3, 0.5, 0.7, 0.85, 0.98)  # after a match of 1, 2-3, 4-7, 8-15, 16 or more tokens

    def __init__(self, min_match: int = 2, max_match: int = 64) -> None:
        if not 1 <= min_match <= max_match:
            raise InvalidInput(f"prompt lookup: 1 <= min_match <= max_match expected, got {min_match}, {max_match}")
        self.min_match = min_match
        self.max_match = max_match

    def propose(self, context: DraftContext) -> Draft:
        drafts = (self._continuation(*pair) for pair in zip(context.tokens, context.max_tokens, strict=True))
        return Draft([[tokens[-1], *draft] for tokens, draft in zip(context.tokens, drafts, strict=True)])

    def levels(self, tokens: Sequence[int], limit: int) -> list[int]:
        """By the length of the match, which each accepted token makes longer by one."""
        _, length = self._match(tokens) if limit > 0 else (-1, 0)
        return [min(length + i, 16).bit_length() - 1 for i in range(limit)] if length else []

    def _continuation(self, tokens: Sequence[int], limit: int) -> list[int]:
        end, length = self._match(tokens) if limit > 0 else (-1, 0)
        if not length:
            return []
        # Past the newest token the copy goes on with itself: a text that repeats keeps repeating.
        source = list(tokens)
        for position in range(end + 1, end + 1 + limit):
            source.append(source[position])
        return source[len(tokens) :]

    def _match(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Where the longest earlier occurrence of the newest tokens ends, and its length; 0 where it is too short."""
        history = np.asarray(tokens)
        ends = np.flatnonzero(history[:-1] == history[-1])  # where an occurrence of the newest token ends
        length = 1
        while len(ends) and length < self.max_match:
            longer = ends[ends >= length]
            longer = longer[history[longer - length] == history[-1 - length]]
            if not len(longer):
                break
            ends, length = longer, length + 1
        return (int(ends[-1]), length) if len(ends) and length >= self.min_match else (-1, 0)
