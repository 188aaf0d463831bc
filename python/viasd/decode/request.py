"""What goes into the decode loop and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from viasd.decode.gate import Gate
from viasd.decode.stats import Stats
from viasd.errors import InvalidInput
from viasd.sampling import Sampling

Tier = Literal["draft", "slim", "full"]


@dataclass(frozen=True)
class Request:
    """Prompt ids and sampling settings; ``sampling.seed`` and ``sampling.eos_token_ids`` may not be None."""

    prompt_tokens: Sequence[int]
    sampling: Sampling


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


@dataclass(frozen=True)
class Token:
    """One emitted token: its id, the text it added (may be empty inside a character), the tier that decided it."""

    id: int
    text: str
    tier: Tier


@dataclass
class Result:
    """What one request generated; ``tiers[i]`` is the tier that decided ``tokens[i]``."""

    prompt_tokens: list[int]
    tokens: list[int] = field(default_factory=list)
    tiers: list[Tier] = field(default_factory=list)
    text: str = ""
    stats: Stats = field(default_factory=Stats)
    finish_reason: Literal["eos", "length", "error"] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Speculation:
    """How to speculate.

    Args:
        mode: "exact": the output is distributed as the full model's (greedy: token for token).
        gamma: most tokens drafted per cycle, at least 1.
        adaptive: draft fewer than ``gamma``, or none, where that is expected to be faster, by the sequence's own recent
            acceptance and the costs of passes as measured on this machine; the output's law stays exact. Costs are
            measured once and then kept, so a seed gives the same output on one ``LanguageModel``, but sampled output
            for a seed may differ between machines and loads; greedy output never does. False drafts up to ``gamma``
            always, and a seed gives the same output everywhere.
        max_pending: the full model is asked once this many tokens wait for it, at least 1.
        gate: when else it is asked.
        co_escalate: sequences of a batch that wait for the full model join a pass that another one needs; changes
            samples, not their law.

    Raises:
        InvalidInput: a value outside its range.
    """

    mode: Literal["exact"] = "exact"
    gamma: int = 15
    adaptive: bool = True
    max_pending: int = 8
    gate: Gate = field(default_factory=Gate)
    co_escalate: bool = False

    def __post_init__(self) -> None:
        if self.mode != "exact":
            raise InvalidInput(f"mode must be 'exact', got {self.mode!r}")
        for name in ("gamma", "max_pending"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidInput(f"{name} must be an integer >= 1, got {value!r}")
