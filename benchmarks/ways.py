"""The ways to decode that `end_to_end.py` compares: Transformers', ours, vLLM's."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

import viasd

BASELINE = "Transformers, greedy"


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids, and where it comes from."""

    question_id: int
    category: str
    ids: list[int]


@dataclass
class Run:
    """What one way did with one prompt; ``timed_tokens`` were decoded in ``decode_ms``; ``total_ms`` is the call's.

    Pass counts are None where the way does not tell them.
    """

    way: str
    question_id: int
    category: str
    prompt_tokens: int
    tokens: list[int]
    timed_tokens: int
    prefill_ms: float
    decode_ms: float
    total_ms: float
    num_draft_passes: int | None = None
    num_slim_passes: int | None = None
    num_full_passes: int | None = None
    identical: bool = True

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.timed_tokens / self.decode_ms if self.decode_ms else float("nan")


Way = Callable[[Prompt, int], Run]


class WayUnavailable(Exception):
    """A way that was asked for cannot run here; the message says why."""


class FirstStep(StoppingCriteria):
    """Stops nothing; notes when the first step ended and how long the sequence was then."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.length = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if not self.length:
            self.seconds, self.length = time.perf_counter(), input_ids.shape[1]
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def transformers_way(name: str, model: Any, **options: Any) -> Way:
    """Transformers' own `generate`; passes are counted by a hook, the prefill's included.

    In early exit the model drafts for itself with its layer count turned down, which tells its passes apart.
    """
    num_layers = model.config.num_hidden_layers

    def decode(prompt: Prompt, max_new_tokens: int) -> Run:
        full_passes: list[bool] = []
        first = FirstStep()
        ids = torch.tensor([prompt.ids])
        started = time.perf_counter()
        with model.register_forward_pre_hook(
            lambda *_: full_passes.append(model.config.num_hidden_layers == num_layers)
        ):
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                stopping_criteria=StoppingCriteriaList([first]),
                **options,
            )[0]
            ended = time.perf_counter()
        timed = len(output) - first.length
        return Run(
            way=name,
            question_id=prompt.question_id,
            category=prompt.category,
            prompt_tokens=len(prompt.ids),
            tokens=output[len(prompt.ids) :].tolist(),
            timed_tokens=timed,
            prefill_ms=1e3 * (first.seconds - started),
            decode_ms=1e3 * (ended - first.seconds) if timed else 0.0,
            total_ms=1e3 * (ended - started),
            num_draft_passes=full_passes.count(False),
            num_slim_passes=0,
            num_full_passes=full_passes.count(True),
        )

    return decode


def viasd_way(name: str, lm: viasd.LanguageModel) -> Way:
    """Our `generate`."""

    def decode(prompt: Prompt, max_new_tokens: int) -> Run:
        started = time.perf_counter()
        result = lm.generate(prompt.ids, max_new_tokens=max_new_tokens)
        total_ms = 1e3 * (time.perf_counter() - started)
        stats = result.stats
        return Run(
            way=name,
            question_id=prompt.question_id,
            category=prompt.category,
            prompt_tokens=len(prompt.ids),
            tokens=result.tokens,
            timed_tokens=len(result.tokens),
            prefill_ms=stats.prefill_ms,
            decode_ms=stats.decode_ms,
            total_ms=total_ms,
            num_draft_passes=stats.num_draft_passes,
            num_slim_passes=stats.num_slim_passes,
            num_full_passes=stats.num_full_passes,
        )

    return decode


class VllmWay:
    """vLLM in a process of another Python, which waits for prompts; see `vllm_worker.py`."""

    def __init__(self, name: str, python: Path, settings: dict[str, Any], eos_token_ids: tuple[int, ...]) -> None:
        self.name, self.eos_token_ids = name, eos_token_ids
        worker = Path(__file__).parent / "vllm_worker.py"
        self._process = subprocess.Popen(
            [str(python), str(worker)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        self.version = self._ask(settings)["ready"]

    def _ask(self, content: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(content) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": "the process ended, see its messages above"}
        if "error" in answer:
            raise WayUnavailable(f"{self.name}: {answer['error']}")
        return answer

    def __call__(self, prompt: Prompt, max_new_tokens: int) -> Run:
        asked = {"ids": prompt.ids, "max_new_tokens": max_new_tokens, "eos_token_ids": self.eos_token_ids}
        answer = self._ask(asked)
        timed = len(answer["tokens"]) - 1
        return Run(
            way=self.name,
            question_id=prompt.question_id,
            category=prompt.category,
            prompt_tokens=len(prompt.ids),
            tokens=answer["tokens"],
            timed_tokens=timed,
            prefill_ms=answer["prefill_ms"],
            decode_ms=answer["total_ms"] - answer["prefill_ms"] if timed else 0.0,
            total_ms=answer["total_ms"],
        )

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.terminate()
        self._process.wait()


def in_process_ways(model: Any, gamma: int, early_exit: int) -> dict[str, Way]:
    """Transformers' ways, drafting ``gamma`` tokens a cycle, and ours by default settings; one copy of the weights."""
    # `generate` takes an assistant's drafting settings from the assistant's own configuration: here the model's.
    model.generation_config.num_assistant_tokens = gamma
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    theirs = {
        BASELINE: {},
        "Transformers, prompt lookup": {"prompt_lookup_num_tokens": gamma},
        "Transformers, early exit": {"assistant_early_exit": early_exit},
    }
    ours = {
        "viasd, plain": viasd.load(model, drafter=None),
        "viasd, prompt lookup": viasd.load(model, drafter="prompt-lookup"),
        "viasd, self-drafting": viasd.load(model, drafter="self"),
        "viasd, three tiers": viasd.load(model, drafter="prompt-lookup", route="default"),
    }
    return {
        **{name: transformers_way(name, model, **options) for name, options in theirs.items()},
        **{name: viasd_way(name, lm) for name, lm in ours.items()},
    }
