"""Decode speed beside Transformers and vLLM: one model, the same prompts, greedy, every way in one run.

For each prompt every way decodes once, in an order that rotates from prompt to prompt, after a warm-up of each way.
Decoding, prefill and the whole call are timed apart. Transformers: decoding starts when the first step's tokens are
there, and those are not counted. viasd: it starts when the prompt but for its last token is in the cache, and every
token counts. vLLM: a call for one token is the prefill, and the rest of a second call the decoding; its processes hold
weights of their own, and wait while others decode.

viasd drafts as many tokens a cycle as pay, by costs that it measures during the warm-up; the others draft `--gamma`.

"Transformers, early exit" is `assistant_early_exit`: the first layers of the model itself, then its head, draft. The
option is meant for models trained for it, but works with every family whose forward runs `layers[:num_hidden_layers]`,
Llama's among them; how often it is right is another matter.

    python benchmarks/end_to_end.py --prompts spec_bench.jsonl --out results/

Ctrl-C ends the run and reports the prompts that every way has finished.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Any

import transformers
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

import viasd
from measure import DTYPES, RESULTS, environment
from viasd.models.embedded import embedded_model
from viasd.report.terminal import progress_bar
from ways import BASELINE, Prompt, Run, VllmWay, Way, WayUnavailable, in_process_ways


def read_prompts(path: Path, tokenizer: Any, arguments: argparse.Namespace) -> list[Prompt]:
    """So many prompts of each category, in turn; the chat template applied, long ones cut to their head."""
    with path.open(encoding="utf-8") as file:
        entries = [json.loads(line) for line in file if line.strip()]
    by_category: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if not arguments.categories or entry["category"] in arguments.categories:
            by_category.setdefault(entry["category"], []).append(entry)
    missing = set(arguments.categories) - set(by_category)
    if missing:
        raise SystemExit(f"--categories: {path} has no prompts of {', '.join(sorted(missing))}")
    chosen = [group[: arguments.num_prompts] for group in by_category.values()]
    prompts = []
    for entry in (entry for row in zip_longest(*chosen) for entry in row if entry is not None):
        chat = [{"role": "user", "content": entry["turns"][0]}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][: arguments.max_prompt]
        prompts.append(Prompt(entry["question_id"], entry["category"], ids))
    return prompts


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
        pairs = list(zip(own, by_way[BASELINE], strict=True))
        timed = [(run, base) for run, base in pairs if run.decode_ms and base.decode_ms]
        passes = {}
        for tier in ("draft", "slim", "full"):
            counts = [getattr(run, f"num_{tier}_passes") for run in own]
            passes[f"num_{tier}_passes"] = None if None in counts else sum(counts)
        full = passes["num_full_passes"]
        rows.append(
            {
                "way": way,
                "tokens_per_second": _median(run.tokens_per_second for run, _ in timed),
                "speedup": _median(run.tokens_per_second / base.tokens_per_second for run, base in timed),
                "prefill_ms": _median(run.prefill_ms for run in own),
                "total_ms": _median(run.total_ms for run in own),
                "total_speedup": _median(base.total_ms / run.total_ms for run, base in pairs),
                "tokens_per_full_pass": sum(len(run.tokens) for run in own) / full if full else None,
                **passes,
                "num_identical": sum(run.identical for run in own),
                "num_prompts": len(own),
            }
        )
    return rows


def _median(values: Iterable[float]) -> float | None:
    """None where every output was too short to be timed."""
    return statistics.median(found) if (found := list(values)) else None


def by_category(runs: Sequence[Run]) -> dict[str, list[dict[str, Any]]]:
    categories = dict.fromkeys(run.category for run in runs)
    return {name: summarise([run for run in runs if run.category == name]) for name in categories}


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The summary as a Markdown table."""
    lines = [
        "| | tokens/s (median) | times Transformers | prefill ms | whole call, times Transformers "
        "| tokens per full pass | passes: draft, slim, full | same output |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        passes = ", ".join(_cell(row[f"num_{tier}_passes"], "d") for tier in ("draft", "slim", "full"))
        numbers = [
            _cell(row["tokens_per_second"], ".1f"),
            _cell(row["speedup"], ".2f"),
            _cell(row["prefill_ms"], ".0f"),
            _cell(row["total_speedup"], ".2f"),
            _cell(row["tokens_per_full_pass"], ".2f"),
        ]
        same = f"{row['num_identical']} of {row['num_prompts']}"
        lines.append(f"| {' | '.join([row['way'], *numbers, passes, same])} |")
    return "\n".join(lines)


def category_markdown(categories: dict[str, list[dict[str, Any]]]) -> str:
    """Speed-up over Transformers' greedy decoding, a category a line."""
    ways = [row["way"] for row in next(iter(categories.values())) if row["way"] != BASELINE]
    lines = [f"| times Transformers | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for name, rows in categories.items():
        speedups = {row["way"]: _cell(row["speedup"], ".2f") for row in rows}
        lines.append(f"| {name} | {' | '.join(speedups[way] for way in ways)} |")
    return "\n".join(lines)


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def draw(file: Path, categories: dict[str, list[dict[str, Any]]], title: str) -> None:
    """Bars of the speed-up over Transformers' greedy decoding, by category and way."""
    from matplotlib.figure import Figure

    ways = [row["way"] for row in next(iter(categories.values())) if row["way"] != BASELINE]
    figure = Figure(figsize=(max(8.0, 1.3 + 0.24 * (len(ways) + 1.5) * len(categories)), 4.8), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(ways)
    for number, way in enumerate(ways):
        places = [place + width * (number - (len(ways) - 1) / 2) for place in range(len(categories))]
        heights = [next(row["speedup"] or 0.0 for row in rows if row["way"] == way) for rows in categories.values()]
        axes.bar(places, heights, width, label=way)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(categories)), list(categories), rotation=20, ha="right")
    axes.set_ylabel(f"decode speed, times\n{BASELINE}")
    axes.set_title(title, fontsize=10)
    axes.grid(axis="y", linewidth=0.4)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(file, dpi=150)


def write(folder: Path, content: dict[str, Any], runs: Sequence[Run]) -> None:
    """The summary as JSON with settings and environment, the single runs as CSV, the categories as a chart."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "end_to_end.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    with (folder / "end_to_end.csv").open("w", encoding="utf-8", newline="") as file:
        lines = [asdict(run) | {"tokens": len(run.tokens), "tokens_per_second": run.tokens_per_second} for run in runs]
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    settings, place = content["settings"], content["environment"]
    title = f"{settings['model']}, {settings['dtype']}, {place['threads']} threads, {settings['prompts']} prompts"
    draw(folder / "end_to_end.png", content["categories"], title)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL with question_id, category and turns")
    parser.add_argument("--model", help="folder or hub name; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--categories", nargs="+", default=[], help="of the prompts' file; default: all")
    parser.add_argument("--num-prompts", type=int, default=2, help="per category")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--max-prompt", type=int, default=1024, help="longer prompts are cut to this many tokens")
    parser.add_argument("--gamma", type=int, default=5, help="drafted tokens per cycle of Transformers and vLLM")
    parser.add_argument("--early-exit", type=int, help="layers that draft in Transformers' early exit; default: half")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="Python of an environment with vLLM: adds its ways")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for JSON, CSV and chart")
    arguments = parser.parse_args()
    if not arguments.prompts.is_file():
        parser.error(f"--prompts: there is no file {arguments.prompts}")
    if min(arguments.num_prompts, arguments.max_prompt, arguments.gamma) < 1 or arguments.max_new_tokens < 2:
        parser.error("--num-prompts, --max-prompt and --gamma must be at least 1, --max-new-tokens at least 2")
    if arguments.vllm and not arguments.vllm.is_file():
        parser.error(f"--vllm: there is no Python {arguments.vllm}")
    return arguments


def vllm_ways(
    arguments: argparse.Namespace, path: str, eos_token_ids: tuple[int, ...], stack: ExitStack
) -> list[VllmWay]:
    """Greedy and n-gram speculation, each an engine of its own, closed with the stack."""
    max_length = arguments.max_prompt + arguments.max_new_tokens + arguments.gamma + 1
    settings = {"model": str(path), "dtype": arguments.dtype, "max_length": max_length}
    ways = []
    for name, gamma in (("vLLM, greedy", 0), ("vLLM, n-gram", arguments.gamma)):
        way = VllmWay(name, arguments.vllm, {**settings, "gamma": gamma}, eos_token_ids)
        stack.callback(way.close)
        ways.append(way)
    return ways


def main() -> None:
    arguments = parse_arguments()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with progress_bar(Console(stderr=True)) as report, ExitStack() as stack:
        report("loading the model", 0, 0)
        path = arguments.model or embedded_model(progress=report)
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[arguments.dtype]).eval()
        prompts = read_prompts(arguments.prompts, tokenizer, arguments)
        if not prompts:
            raise SystemExit(f"--prompts: {arguments.prompts} is empty")
        early_exit = arguments.early_exit or max(1, model.config.num_hidden_layers // 2)
        ways = in_process_ways(model, arguments.gamma, early_exit)
        vllm_version = None
        if arguments.vllm:
            report("starting vLLM", 0, 0)
            try:
                added = vllm_ways(arguments, path, viasd.load(model, drafter=None).eos_token_ids, stack)
            except WayUnavailable as error:
                raise SystemExit(str(error)) from None
            ways |= {way.name: way for way in added}
            vllm_version = added[0].version
        runs = measure(ways, prompts, arguments.max_new_tokens, report)
    if not runs:
        raise SystemExit("no prompt was measured")
    content = {
        "settings": {
            "model": arguments.model or Path(path).name,
            "prompts": len(runs) // len(ways),
            "max_new_tokens": arguments.max_new_tokens,
            "max_prompt": arguments.max_prompt,
            "gamma": arguments.gamma,
            "early_exit_layers": early_exit,
            "dtype": arguments.dtype,
        },
        "environment": environment() | ({"vllm": vllm_version} if vllm_version else {}),
        "summary": summarise(runs),
        "categories": by_category(runs),
    }
    write(arguments.out, content, runs)
    print(markdown(content["summary"]))
    print(f"\n{category_markdown(content['categories'])}")
    print(f"\n{json.dumps(content['settings'] | content['environment'])}")


if __name__ == "__main__":
    main()
