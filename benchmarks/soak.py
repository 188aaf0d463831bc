"""Random decoding for as long as one likes: no wrong token, and no growth of memory.

Each case is drawn from its number alone: prompts and their lengths, batch size, drafter, route, draft length, fixed or
adaptive, greedy or sampled, all at once, streamed and given up half-way, or from several threads. Checked is that

- greedy output is that of plain decoding with the same model object, except where the two best logits are closer than
  a pass over several rows resolves (`--tie`; such places are counted);
- the same seed gives the same tokens twice;
- the process's memory, garbage collected, does not grow by more than `--allowance-mib` over its size after the first
  third of the time.

    python benchmarks/soak.py --minutes 60
    python benchmarks/soak.py --case 1234        # that case again

Exit status 1 names the case. The default model is a tiny random one of the Llama family. Memory is read the way Linux
and glibc tell it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import viasd
from viasd.decode import Costs
from viasd.models import TransformersModel
from viasd.report.terminal import progress_bar

NUM_THREADS = 3
COSTS = Costs((1, 2, 10), (1.0, 1.4, 3.0))  # made up: a case must repeat, and draft lengths change within it


class Mismatch(Exception):
    """Wrong tokens; the message says where."""


@dataclass(frozen=True)
class Case:
    """What one case does, all of it drawn from its number."""

    number: int
    kind: str
    drafter: str | None
    route: str | None
    gamma: int
    adaptive: bool
    max_pending: int
    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int
    prompt_lengths: tuple[int, ...]

    @classmethod
    def draw(cls, number: int, max_length: int) -> Case:
        """The case of this number; ``max_length`` bounds prompt and output together."""
        pick = random.Random(number)
        longest = max_length // 2
        return cls(
            number=number,
            kind=pick.choice(("together", "together", "abandoned", "threads")),
            drafter=pick.choice((None, "prompt-lookup", "self", "small model")),
            route=pick.choice((None, "default")),
            gamma=pick.randint(1, 9),
            adaptive=pick.choice((True, False)),
            max_pending=pick.randint(1, 12),
            temperature=pick.choice((0.0, 0.0, 0.5, 1.0, 1.7)),
            top_k=pick.choice((0, 0, 5)),
            top_p=pick.choice((1.0, 1.0, 0.8)),
            max_new_tokens=pick.randint(1, longest),
            prompt_lengths=tuple(pick.randint(1, longest) for _ in range(pick.randint(1, 4))),
        )

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """A third of the ids come from a handful, so that prompt lookup finds repetitions."""
        pick = random.Random(~self.number)
        few = [pick.randrange(vocabulary) for _ in range(4)]
        draw = [lambda: pick.choice(few), lambda: pick.randrange(vocabulary), lambda: pick.randrange(vocabulary)]
        return [[pick.choice(draw)() for _ in range(length)] for length in self.prompt_lengths]


class Soak:
    """The models, and how many places were too close to call."""

    def __init__(self, model: torch.nn.Module, small: torch.nn.Module, max_length: int, tie: float) -> None:
        self.module, self.max_length, self.tie = model, max_length, tie
        self.model, self.small = TransformersModel(model), TransformersModel(small)
        self.plain = viasd.load(self.model, drafter=None)
        self.num_ties = 0

    def run(self, number: int) -> None:
        case = Case.draw(number, self.max_length)
        prompts = case.prompts(self.model.vocab_size)
        speculation = viasd.Speculation(gamma=case.gamma, adaptive=case.adaptive, max_pending=case.max_pending)
        drafter: Any = self.small if case.drafter == "small model" else case.drafter
        lm = viasd.load(self.model, drafter=drafter, route=case.route, speculation=speculation)
        lm.costs = COSTS
        settings = {"max_new_tokens": case.max_new_tokens, "temperature": case.temperature, "seed": number}
        settings |= {"top_k": case.top_k, "top_p": case.top_p}
        again = self.plain if case.temperature == 0 else lm
        if case.kind == "together":
            outputs = [result.tokens for result in lm.generate(prompts, **settings)]
            expected = [result.tokens for result in again.generate(prompts, **settings)]
        elif case.kind == "abandoned":
            stop = random.Random(number).randint(1, case.max_new_tokens)
            outputs = [self._abandoned(lm, prompt, stop, settings) for prompt in prompts]
            whole = [again.generate(prompt, **settings).tokens for prompt in prompts]
            expected = [tokens[:stop] for tokens in whole]
        else:
            with ThreadPoolExecutor(NUM_THREADS) as threads:
                tasks = [threads.submit(lm.generate, prompt, **settings) for prompt in prompts * 2]
                both = [task.result().tokens for task in tasks]
            outputs, expected = both[: len(prompts)], both[len(prompts) :]
            if case.temperature == 0:
                expected = [self.plain.generate(prompt, **settings).tokens for prompt in prompts]
        for prompt, got, wanted in zip(prompts, outputs, expected, strict=True):
            self._compare(case, prompt, got, wanted)

    def _abandoned(self, lm: viasd.LanguageModel, prompt: list[int], stop: int, settings: dict[str, Any]) -> list[int]:
        stream = lm.stream(prompt, **settings)
        return [token.id for token in itertools.islice(stream, stop)]

    def _compare(self, case: Case, prompt: list[int], got: list[int], wanted: list[int]) -> None:
        if got == wanted:
            return
        pairs = itertools.zip_longest(got, wanted)
        place = next(i for i, (own, other) in enumerate(pairs) if own != other)
        with torch.no_grad():
            logits = self.module(torch.tensor([prompt + wanted[:place]])).logits[0, -1]
        best, second = logits.float().topk(2).values.tolist()
        if case.temperature == 0 and place < min(len(got), len(wanted)) and best - second < self.tie:
            self.num_ties += 1
            return
        raise Mismatch(f"{case}\nprompt {prompt}\ngot    {got}\nwanted {wanted}\nfirst difference at {place}")


def tiny(seed: int, max_length: int) -> torch.nn.Module:
    """A random model with logits far enough apart to have an opinion."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_length,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=7,  # some outputs end by themselves
    )
    return LlamaForCausalLM(config).eval()


def resident_mib() -> float:
    """Of this process, after a garbage collection, and with what the allocator holds back returned to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


def run_cases(soak: Soak, first: int, seconds: float, allowance_mib: float) -> int:
    """Cases from ``first`` on, at least one, until the time is over; the exit status."""
    started, warm_mib = time.monotonic(), None
    with progress_bar(Console(stderr=True)) as report:
        for number in itertools.count(first):
            report(f"case {number}", int(time.monotonic() - started), int(seconds))
            try:
                soak.run(number)
            except Exception as error:
                print(f"case {number} failed: {type(error).__name__}: {error}", file=sys.stderr)
                print(f"again: python {' '.join([*sys.argv, '--case', str(number)])}", file=sys.stderr)
                return 1
            elapsed = time.monotonic() - started
            if warm_mib is None and elapsed >= seconds / 3:
                warm_mib = resident_mib()
            if elapsed >= seconds:
                break
    grown = resident_mib() - (warm_mib or 0.0)
    print(f"{number - first + 1} cases, {soak.num_ties} near ties, memory grew by {grown:.1f} MiB from {warm_mib:.0f}")
    if grown > allowance_mib:
        print(f"memory grew by more than {allowance_mib} MiB, cases {first} to {number}", file=sys.stderr)
        return 1
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case; the next ones follow")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--model", help="folder of a model; it also drafts for itself; default: a tiny random one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-length", type=int, default=96, help="of prompt and output together")
    parser.add_argument("--tie", type=float, default=1e-3, help="logits closer than this are equal")
    parser.add_argument("--allowance-mib", type=float, default=32.0, help="growth of memory that is let pass")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
        small = model
    else:
        model, small = (tiny(seed, arguments.max_length).to(dtype) for seed in (0, 1))
    soak = Soak(model, small, arguments.max_length, arguments.tie)
    if arguments.case is not None:
        print(Case.draw(arguments.case, arguments.max_length))
        sys.exit(run_cases(soak, arguments.case, 0.0, arguments.allowance_mib))
    sys.exit(run_cases(soak, arguments.seed, 60 * arguments.minutes, arguments.allowance_mib))


if __name__ == "__main__":
    main()
