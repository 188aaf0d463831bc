"""What goes into the decode loop and what comes out of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch

from viasd.decode.gate import Gate
from viasd.decode.stats import Stats
from viasd.errors import InvalidInput
from viasd.sampling import Sampling

Tier = Literal["draft", "slim", "full"]
Finish = Literal["eos", "stop", "length", "error"]
LogitsProcessor: TypeAlias = Callable[[list[int], torch.Tensor], torch.Tensor]
Stopping: TypeAlias = Callable[[list[int]], bool]
MODES = ("exact", "tiered")


@dataclass(frozen=True)
class Speculation:
    """How to speculate.

    Args:
        mode: "exact": the output is distributed as the full model's (greedy: token for token). "tiered": VIA-SD's own
            rule, arXiv:2606.12243 as reported in public notes; the gate decides from the slim tier's distribution
            which drafted tokens are kept, drawn again by the slim tier, or left to the full model. It needs a route,
            takes chains only, and approximates the full model.
        gamma: most tokens drafted per cycle, at least 1.
        adaptive: draft fewer than ``gamma``, or none, where that is expected to be faster, by the sequence's own recent
            acceptance and the costs of passes as measured on this machine; the output's law stays exact. Costs are
            measured once and then kept, so a seed gives the same output on one ``LanguageModel``, but sampled output
            for a seed may differ between machines and loads; greedy output never does. False drafts up to ``gamma``
            always, and a seed gives the same output everywhere.
        max_pending: the full model is asked once this many tokens wait for it, at least 1.
        gate: when else it is asked; in tiered mode, what is emitted.
        co_escalate: this request joins a full pass that another one of the batch needs; changes samples, not their law.

    Raises:
        InvalidInput: a value outside its range.
    """

    mode: Literal["exact", "tiered"] = "exact"
    gamma: int = 15
    adaptive: bool = True
    max_pending: int = 8
    gate: Gate = field(default_factory=Gate)
    co_escalate: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidInput(f"mode must be 'exact' or 'tiered', got {self.mode!r}")
        if not isinstance(self.gate, Gate):
            raise InvalidInput(f"gate must be a viasd.Gate, got {type(self.gate).__name__}")
        for name in ("gamma", "max_pending"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidInput(f"{name} must be an integer >= 1, got {value!r}")


@dataclass(frozen=True)
class Request:
    """What to decode, and how.

    Args:
        prompt_tokens: ids, at least one.
        sampling: ``seed`` and ``eos_token_ids`` may not be None. Its ``stop`` strings need text, of which the loop
            knows nothing: who has a tokenizer turns them into ``stopping``.
        speculation: None takes the run's.
        logits_processor: ``logits_processor(tokens, logits [V]) -> [V]`` edits the distribution after ``tokens``, the
            prompt and everything that precedes the position, drafted tokens included; -inf masks, so a grammar can be
            one. It runs at every draft, slim and full row, after the penalties and before temperature and top-k, but
            not behind a token that it or another setting has masked, nor behind an end of sequence.
        stopping: ``stopping(tokens)`` is told the prompt and the output after each token; True makes that token the
            last one. It may be asked about tokens that a later pass takes back, so it must depend on ``tokens`` alone.
        keep_logits: hand out the logits behind every token (``Result.logits`` and ``Result.scores``).
    """

    prompt_tokens: Sequence[int]
    sampling: Sampling
    speculation: Speculation | None = None
    logits_processor: LogitsProcessor | None = None
    stopping: Stopping | None = None
    keep_logits: bool = False


def check_request(request: Request, vocab_size: int, max_positions: int) -> None:
    """Raise ``InvalidInput`` for a request that a model of this vocabulary and context cannot take."""
    ids = request.prompt_tokens
    if not ids:
        raise InvalidInput("prompt is empty; at least one token is needed")
    if len(ids) >= max_positions:
        raise InvalidInput(f"prompt has {len(ids)} tokens; the model's context holds {max_positions}, output included")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise InvalidInput(f"prompt: ids must lie in [0, {vocab_size}), got {outside[0]}")
    if request.sampling.seed is None or request.sampling.eos_token_ids is None:
        raise InvalidInput("request: sampling.seed and sampling.eos_token_ids must be given, got None")
    request.sampling.check_ids(vocab_size)
    if request.sampling.stop and request.stopping is None:
        raise InvalidInput("request: sampling.stop has strings, but stopping, which would look for them, is None")


@dataclass(frozen=True)
class Token:
    """One emitted token: its id, the text it added (may be empty inside a character), the tier that decided it."""

    id: int
    text: str
    tier: Tier


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities (nats) at one position under the raw logits: before penalties, masks and temperature.

    ``top`` has the most likely ids with theirs, best first.
    """

    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Result:
    """What one request generated; ``tiers[i]`` is the tier that decided ``tokens[i]``.

    ``finish_reason``: an end-of-sequence token, a stop string or ``stopping``, the length, or broken logits; None while
    decoding. ``logprobs[i]`` (where ``Sampling.logprobs`` asks), ``logits[i]`` [V], raw, and ``scores[i]`` [V], with
    all settings but temperature (where ``Request.keep_logits`` asks), belong to ``tokens[i]`` and come from the pass
    that decided it: the full model's, in exact mode.
    """

    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    tiers: list[Tier] = field(default_factory=list)
    text: str = ""
    stats: Stats = field(default_factory=Stats)
    finish_reason: Finish | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)
