"""Decode speed beside Transformers: one model, the same prompts, greedy, every way in one run.

For each prompt every way decodes once, in an order that rotates from prompt to prompt, after a warm-up of each way.
Prefill is left out on both sides. Transformers: the clock starts when the first step's tokens are there, and those are
not counted. viasd: the clock starts when the prompt but for its last token is in the cache, and every token counts.

    python benchmarks/end_to_end.py --prompts spec_bench.jsonl --out results/
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

import viasd
from viasd.models.embedded import embedded_model
from viasd.report.terminal import progress_bar

BASELINE = "Transformers, greedy"


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids, and where it comes from."""

    question_id: int
    category: str
    ids: list[int]


@dataclass
class Run:
    """What one way did with one prompt; ``timed_tokens`` were decoded in ``decode_ms``."""

    way: str
    question_id: int
    category: str
    prompt_tokens: int
    tokens: list[int]
    timed_tokens: int
    decode_ms: float
    num_draft_passes: int
    num_slim_passes: int
    num_full_passes: int
    identical: bool = True

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.timed_tokens / self.decode_ms if self.decode_ms else float("nan")


Way = Callable[[Prompt, int], Run]


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
    """Transformers' own `generate`; full passes are counted by a hook, the prefill's included."""

    def decode(prompt: Prompt, max_new_tokens: int) -> Run:
        passes: list[int] = []
        first = FirstStep()
        ids = torch.tensor([prompt.ids])
        with model.register_forward_pre_hook(lambda *_: passes.append(1)):
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                stopping_criteria=StoppingCriteriaList([first]),
                **options,
            )[0]
            decode_ms = 1e3 * (time.perf_counter() - first.seconds)
        tokens = output[len(prompt.ids) :].tolist()
        timed = len(output) - first.length
        source = name, prompt.question_id, prompt.category, len(prompt.ids)
        return Run(*source, tokens, timed, decode_ms if timed else 0.0, 0, 0, len(passes))

    return decode


def viasd_way(name: str, lm: viasd.LanguageModel) -> Way:
    """Our `generate`."""

    def decode(prompt: Prompt, max_new_tokens: int) -> Run:
        result = lm.generate(prompt.ids, max_new_tokens=max_new_tokens)
        stats = result.stats
        source = name, prompt.question_id, prompt.category, len(prompt.ids)
        passes = stats.num_draft_passes, stats.num_slim_passes, stats.num_full_passes
        return Run(*source, result.tokens, len(result.tokens), stats.decode_ms, *passes)

    return decode


def all_ways(model: Any, gamma: int) -> dict[str, Way]:
    """Every way on one copy of the weights; the same number of drafted tokens for all."""
    speculation = viasd.Speculation(gamma=gamma)
    ours = {
        "viasd, plain": viasd.load(model, drafter=None),
        "viasd, prompt lookup": viasd.load(model, drafter="prompt-lookup", speculation=speculation),
        "viasd, self-drafting": viasd.load(model, drafter="self", speculation=speculation),
        "viasd, three tiers": viasd.load(model, drafter="prompt-lookup", route="default", speculation=speculation),
    }
    lookup = "Transformers, prompt lookup"
    return {
        BASELINE: transformers_way(BASELINE, model),
        lookup: transformers_way(lookup, model, prompt_lookup_num_tokens=gamma),
        **{name: viasd_way(name, lm) for name, lm in ours.items()},
    }


def read_prompts(path: Path, tokenizer: Any, count: int, max_prompt: int) -> list[Prompt]:
    """``count`` prompts, taken from the categories in turn; the chat template applied, long ones cut to their head."""
    with path.open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file if line.strip()]
    by_category: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        by_category.setdefault(entry["category"], []).append(entry)
    prompts = []
    for entry in islice(_in_turn(list(by_category.values())), count):
        chat = [{"role": "user", "content": entry["turns"][0]}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:max_prompt]
        prompts.append(Prompt(entry["question_id"], entry["category"], ids))
    return prompts


def _in_turn(groups: Sequence[Sequence[Any]]) -> Iterator[Any]:
    for place in range(max(map(len, groups), default=0)):
        yield from (group[place] for group in groups if place < len(group))


def measure(ways: dict[str, Way], prompts: Sequence[Prompt], max_new_tokens: int, report: Any) -> list[Run]:
    """All runs of all prompts; after Ctrl-C those of the prompts that every way had finished."""
    names = list(ways)
    done: list[Run] = []
    try:
        for name in names:
            report(f"warming up: {name}", 0, len(prompts) * len(names))
            ways[name](prompts[0], 8)
        for number, prompt in enumerate(prompts):
            runs: list[Run] = []
            for name in islice(cycle(names), number % len(names), number % len(names) + len(names)):
                report(f"prompt {number + 1}: {name}", len(done) + len(runs), len(prompts) * len(names))
                runs.append(ways[name](prompt, max_new_tokens))
            expected = next(run.tokens for run in runs if run.way == BASELINE)
            for run in runs:
                run.identical = run.tokens == expected
            done += sorted(runs, key=lambda run: names.index(run.way))
    except KeyboardInterrupt:
        print(f"interrupted: {len(done) // len(names)} of {len(prompts)} prompts are finished")
    return done


def summarise(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """One row per way: medians over the prompts, sums of passes, and how many outputs equal the baseline's."""
    by_way: dict[str, list[Run]] = {}
    for run in runs:
        by_way.setdefault(run.way, []).append(run)
    rows = []
    for way, own in by_way.items():
        timed = [
            (run, base) for run, base in zip(own, by_way[BASELINE], strict=True) if run.decode_ms and base.decode_ms
        ]
        full_passes = sum(run.num_full_passes for run in own)
        rows.append(
            {
                "way": way,
                "tokens_per_second": statistics.median(run.tokens_per_second for run, _ in timed),
                "speedup": statistics.median(run.tokens_per_second / base.tokens_per_second for run, base in timed),
                "tokens_per_full_pass": sum(len(run.tokens) for run in own) / full_passes,
                "num_draft_passes": sum(run.num_draft_passes for run in own),
                "num_slim_passes": sum(run.num_slim_passes for run in own),
                "num_full_passes": full_passes,
                "identical": f"{sum(run.identical for run in own)} of {len(own)}",
            }
        )
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The summary as a Markdown table."""
    lines = [
        "| | tokens/s (median) | times Transformers | tokens per full pass | passes: draft, slim, full | same output |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        passes = ", ".join(str(row[f"num_{tier}_passes"]) for tier in ("draft", "slim", "full"))
        lines.append(
            f"| {row['way']} | {row['tokens_per_second']:.1f} | {row['speedup']:.2f} | "
            f"{row['tokens_per_full_pass']:.2f} | {passes} | {row['identical']} |"
        )
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    """What the figures depend on beside the settings."""
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "processor": names[0] if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write(folder: Path, settings: dict[str, Any], rows: Sequence[dict[str, Any]], runs: Sequence[Run]) -> None:
    """The summary as JSON with settings and environment, the single runs as CSV."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"settings": settings, "environment": environment(), "summary": rows}
    (folder / "end_to_end.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    with (folder / "end_to_end.csv").open("w", encoding="utf-8", newline="") as file:
        lines = [asdict(run) | {"tokens": len(run.tokens), "tokens_per_second": run.tokens_per_second} for run in runs]
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with question_id, category and turns")
    parser.add_argument("--model", help="folder or hub name; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-prompt", type=int, default=1024, help="longer prompts are cut to this many tokens")
    parser.add_argument("--gamma", type=int, default=5, help="drafted tokens per cycle, Transformers' included")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for JSON and CSV")
    arguments = parser.parse_args()
    if not arguments.prompts.is_file():
        parser.error(f"--prompts: there is no file {arguments.prompts}")
    if min(arguments.num_prompts, arguments.max_prompt, arguments.gamma) < 1 or arguments.max_new_tokens < 2:
        parser.error("--num-prompts, --max-prompt and --gamma must be at least 1, --max-new-tokens at least 2")

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with progress_bar(Console(stderr=True)) as report:
        report("loading the model", 0, 0)
        path = arguments.model or embedded_model(progress=report)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        prompts = read_prompts(arguments.prompts, tokenizer, arguments.num_prompts, arguments.max_prompt)
        if not prompts:
            parser.error(f"--prompts: {arguments.prompts} is empty")
        runs = measure(all_ways(model, arguments.gamma), prompts, arguments.max_new_tokens, report)
    if not runs:
        parser.error("no prompt was measured")
    settings = {
        "model": arguments.model or Path(path).name,
        "prompts": len(runs) // len({run.way for run in runs}),
        "max_new_tokens": arguments.max_new_tokens,
        "max_prompt": arguments.max_prompt,
        "gamma": arguments.gamma,
        "dtype": "float32",
    }
    rows = summarise(runs)
    write(arguments.out, settings, rows, runs)
    print(markdown(rows))
    print(f"\n{json.dumps(settings | environment())}")


if __name__ == "__main__":
    main()
