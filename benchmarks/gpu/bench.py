"""What the parts share: the device, sizes, the time that is left, and what one makes and others use."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from gpu.record import Attempts
from timing import Cases
from viasd_kernels import DecoderConfig, LayerConfig, RopeConfig

LLAMA3_ROPE = RopeConfig(theta=500_000.0, kind="llama3", factor=8.0)
QWEN3_ROPE = RopeConfig(theta=1_000_000.0)

MODELS = {
    "Llama-3.1-8B": DecoderConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        layers=(LayerConfig(rope=LLAMA3_ROPE),) * 32,
        norm_eps=1e-5,
    ),
    "Qwen3-8B": DecoderConfig(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        layers=(LayerConfig(rope=QWEN3_ROPE),) * 36,
        qk_norm=True,
    ),
}
TINY = DecoderConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    layers=(LayerConfig(),) * 4,
    qk_norm=True,
)


@dataclass(frozen=True)
class Plan:
    """Sizes: those of real models on a GPU, or of a rehearsal."""

    rehearsal: bool = False
    dtype: str = "bfloat16"
    models: dict[str, DecoderConfig] = field(default_factory=lambda: dict(MODELS))
    repeats: int = 20
    vocabularies: Sequence[int] = (128_256, 151_936)
    logit_rows: Sequence[int] = (8, 32)
    norm_rows: Sequence[int] = (8, 1024)
    linear_rows: Sequence[int] = (1, 8, 16, 64)
    contexts: Sequence[int] = (2048, 16_384)
    attention_rows: Sequence[int] = (8, 64)
    greedy_batch: tuple[int, int] = (64, 64)
    step_rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    eager_rows: Sequence[int] = (1, 8)
    batches: Sequence[int] = (1, 4, 8, 16, 32)
    context: int = 512
    decode_batches: Sequence[int] = (1, 4, 8)
    new_tokens: int = 192
    gamma: int = 7
    tokens_per_pass: Sequence[int] = (2, 3, 4)


REHEARSAL = Plan(
    rehearsal=True,
    dtype="float32",  # the interpreter is wrong about bfloat16
    models={"tiny": TINY},
    repeats=1,
    vocabularies=(70,),
    logit_rows=(3,),
    norm_rows=(2,),
    linear_rows=(2,),
    contexts=(20,),
    attention_rows=(3,),
    greedy_batch=(2, 3),
    step_rows=(1, 2),
    eager_rows=(1,),
    batches=(2,),
    context=4,
    decode_batches=(1,),
    new_tokens=5,
    gamma=2,
    tokens_per_pass=(2,),
)


class Bench:
    """Handed to every part. ``shared`` lives as long as one step's parts follow each other."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.device = torch.device("cpu") if plan.rehearsal else torch.device("cuda", 0)
        self.attempts = Attempts()
        self.progress: Callable[[Any], None] = lambda result: None
        self.deadline = float("inf")
        self.shared: dict[str, Any] = {}
        self._cases: Cases | None = None

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.plan.dtype)

    @property
    def remaining_s(self) -> float:
        """Until the step's deadline."""
        return self.deadline - time.monotonic()

    def attempt(self, what: str) -> AbstractContextManager[None]:
        """See ``Attempts.attempt``."""
        return self.attempts.attempt(what)

    @property
    def cases(self) -> Cases:
        """Timed cases; one for all parts, so that all are measured by the same bandwidth."""
        if self._cases is None:
            buffer_bytes = 1 << 16
            if self.device.type == "cuda":
                buffer_bytes = 4 * torch.cuda.get_device_properties(self.device).L2_cache_size
            self._cases = Cases(self.device, buffer_bytes, self.plan.repeats, attempt=self.attempt)
        return self._cases

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def clear(self) -> None:
        """Forget what the last step made."""
        self.shared.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
