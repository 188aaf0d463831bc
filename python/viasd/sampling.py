"""What a request asks of sampling, and the masks that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from viasd.errors import InvalidInput


@dataclass(frozen=True)
class Sampling:
    """One request's settings.

    Args:
        max_new_tokens: at least 1.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens (ties with the last kept stay); 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches this; in (0, 1].
        min_p: drop tokens less likely than this times the most likely one; in [0, 1].
        seed: of the request's own coins; None draws one from torch's global generator.
        eos_token_ids: tokens that end the output; None takes the model's own, () none.
        repetition_penalty: divides positive logits of ids that occur in prompt or output, multiplies negative ones
            (Keskar et al., arXiv:1909.05858); above 0, 1 does nothing.
        frequency_penalty, presence_penalty: taken off an id's logit for each time that it occurs in the output, and
            once if it does; prompts do not count.
        logit_bias: id -> number added to its logit; -inf forbids it. Kept as sorted pairs.
        bad_words: sequences of ids that never occur whole in the output; their beginning may lie in the prompt.
        min_new_tokens: until there are as many, ``eos_token_ids`` are masked and stop strings are not looked for.
        stop: strings, or one; the token that completes one is the last, and the text ends before it.
        logprobs: report each token's log-probability, and this many most likely ids with theirs; None reports nothing.

    The penalties apply in this order, then bias, bad words, minimum length, a request's own processor, and last top-k,
    top-p and min-p, each on what the one before left, to the draft, the slim and the full distribution alike, with the
    counts of the very tokens that precede each position; so the output's law is that of the full model under the same
    settings.

    Raises:
        InvalidInput: a value outside its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    eos_token_ids: tuple[int, ...] | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: Sequence[Sequence[int]] = ()
    min_new_tokens: int = 0
    stop: str | Sequence[str] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, kind, expected, fits in (
            ("max_new_tokens", int, "an integer >= 1", lambda x: x >= 1),
            ("temperature", float, "a finite number >= 0", lambda x: 0.0 <= x < float("inf")),
            ("top_k", int, "an integer >= 0", lambda x: x >= 0),
            ("top_p", float, "a number in (0, 1]", lambda x: 0.0 < x <= 1.0),
            ("min_p", float, "a number in [0, 1]", lambda x: 0.0 <= x <= 1.0),
            ("repetition_penalty", float, "a finite number > 0", lambda x: 0.0 < x < float("inf")),
            ("frequency_penalty", float, "a finite number", math.isfinite),
            ("presence_penalty", float, "a finite number", math.isfinite),
            ("min_new_tokens", int, "an integer >= 0", lambda x: x >= 0),
            ("logprobs", int, "None or an integer >= 0", lambda x: x >= 0),
        ):
            value = getattr(self, name)
            if value is None and name == "logprobs":
                continue
            right_kind = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
            if not right_kind or not fits(value):
                raise InvalidInput(f"{name} must be {expected}, got {value!r}")
            object.__setattr__(self, name, kind(value))
        if self.min_new_tokens > self.max_new_tokens:
            raise InvalidInput(
                f"min_new_tokens must be at most max_new_tokens, {self.max_new_tokens}, got {self.min_new_tokens}"
            )
        eos = self.eos_token_ids
        if eos is not None and not (isinstance(eos, tuple) and all(type(token) is int for token in eos)):
            raise InvalidInput(f"eos_token_ids must be None or a tuple of integers, got {eos!r}")
        if self.seed is not None and not (isinstance(self.seed, int) and -(2**63) <= self.seed < 2**63):
            raise InvalidInput(f"seed must be None or a 64-bit integer, got {self.seed!r}")
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        object.__setattr__(self, "bad_words", _words(self.bad_words))
        object.__setattr__(self, "stop", _strings(self.stop))

    @property
    def edits(self) -> bool:
        """Whether ``edit_row`` does anything."""
        return bool(
            self.repetition_penalty != 1.0
            or self.frequency_penalty
            or self.presence_penalty
            or self.logit_bias
            or self.bad_words
            or (self.min_new_tokens and self.eos_token_ids)
        )

    def check_ids(self, vocab_size: int) -> None:
        """Raise ``InvalidInput`` for an id in ``logit_bias`` or ``bad_words`` that a vocabulary does not have."""
        for name, ids in (
            ("logit_bias", dict(self.logit_bias)),
            ("bad_words", [token for word in self.bad_words for token in word]),
        ):
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                raise InvalidInput(f"{name}: ids must lie in [0, {vocab_size}), got {outside[0]}")

    @property
    def masks(self) -> tuple[float, int, float, float] | None:
        """What ``mask_logits`` depends on; None when nothing is masked."""
        if self.temperature == 0 or (self.top_k == 0 and self.top_p == 1.0 and self.min_p == 0.0):
            return None
        return self.temperature, self.top_k, self.top_p, self.min_p


def _bias_pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = sorted(dict(bias).items())
        fits = all(type(token) is int and token >= 0 and float(value) < math.inf for token, value in pairs)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise InvalidInput(f"logit_bias must map ids >= 0 to numbers below +inf, got {bias!r}")
    return tuple((token, float(value)) for token, value in pairs)


def _words(words: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(words, Iterable) and not isinstance(words, (str, Mapping)):
        kept = [tuple(word) if isinstance(word, (list, tuple)) else () for word in words]
        if all(word and all(type(token) is int and token >= 0 for token in word) for word in kept):
            return tuple(kept)
    raise InvalidInput(f"bad_words must be sequences of ids >= 0, none of them empty, got {words!r}")


def _strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, (list, tuple)) else (None,)
    if not all(isinstance(string, str) and string for string in strings):
        raise InvalidInput(f"stop must be a string or several, none of them empty, got {stop!r}")
    return strings


def edit_row(logits: torch.Tensor, sampling: Sampling, tokens: Sequence[int], num_prompt: int) -> torch.Tensor:
    """[V] logits after penalties, bias, bad words and minimum length; the input stays as it is.

    Args:
        logits: [V], possibly a drafter's, which may lack ids that the settings name.
        tokens: what precedes the position: ``num_prompt`` ids of the prompt, then the output, drafted ones included.
    """
    if not sampling.edits:
        return logits
    row, width = logits.float().clone(), logits.shape[-1]
    history = torch.tensor(tokens, device=row.device)
    if sampling.repetition_penalty != 1.0:
        seen = history[history < width].unique()
        values = row[seen]
        row[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        output = history[num_prompt:]
        seen, counts = output[output < width].unique(return_counts=True)
        row[seen] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    for token, bias in dict(sampling.logit_bias).items():
        if token < width:
            row[token] += bias
    banned = [
        word[-1] for word in sampling.bad_words if tuple(tokens[len(tokens) - len(word) + 1 :]) == tuple(word[:-1])
    ]
    if len(tokens) - num_prompt < sampling.min_new_tokens:
        banned += sampling.eos_token_ids or ()
    for token in banned:
        if 0 <= token < width:
            row[token] = -torch.inf
    return row.to(logits.dtype)


def mask_logits(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """[n, V] logits before temperature, with what the settings exclude at -inf; the most likely token always stays."""
    # The maximum goes first: a tiny temperature would otherwise overflow.
    scaled = logits.float()
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature
    if 0 < top_k < logits.shape[-1]:
        scaled = scaled.masked_fill(scaled < scaled.topk(top_k).values[..., -1:], -torch.inf)
    if top_p < 1.0:
        scaled = _keep_top_p(scaled, top_p)
    if min_p > 0.0:
        probs = scaled.softmax(-1)
        scaled = scaled.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return logits.masked_fill(scaled == -torch.inf, -torch.inf)


def _keep_top_p(scaled: torch.Tensor, top_p: float, num_first: int = 1024) -> torch.Tensor:
    """[n, V] with all but the most likely tokens at -inf, of which those before each have less than ``top_p``."""
    # The nucleus is mostly small; only rows where the first few do not hold it are sorted whole.
    probs, order = scaled.softmax(-1).topk(min(num_first, scaled.shape[-1]))
    running = probs.cumsum(-1)
    kept = (running - probs < top_p).scatter_(-1, torch.zeros_like(order[:, :1]), True)
    masked = torch.full_like(scaled, -torch.inf).scatter_(-1, order, scaled.gather(-1, order).where(kept, -torch.inf))
    wide = running[:, -1] < top_p
    if probs.shape[-1] < scaled.shape[-1] and bool(wide.any()):
        masked[wide] = _keep_top_p(scaled[wide], top_p, scaled.shape[-1])
    return masked


def mask_rows(logits: torch.Tensor, settings: Sequence[Sampling], row_start: Sequence[int]) -> torch.Tensor:
    """Each sequence's rows of ``logits [R, V]`` masked by its settings; rows without masks come back as they are."""
    rows_of: dict[tuple[float, int, float, float], list[int]] = {}
    for b, sampling in enumerate(settings):
        if sampling.masks:
            rows_of.setdefault(sampling.masks, []).extend(range(row_start[b], row_start[b + 1]))
    if not rows_of:
        return logits
    logits = logits.clone()
    for masks, rows in rows_of.items():
        index = torch.tensor(rows, device=logits.device)
        logits[index] = mask_logits(logits[index], *masks)
    return logits
