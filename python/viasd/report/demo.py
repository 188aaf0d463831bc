"""What `viasd demo` does: decode the same prompts plainly, in two tiers and in three, and say what paid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table
from rich.text import Text

from viasd.decode import Result, Tier, Token, slim_cost
from viasd.drafters import Drafter
from viasd.language_model import LanguageModel
from viasd.report.terminal import Report, bypass_words, legend, plain_table, tiered_text

PROMPTS = (
    "Repeat this text word for word: The library opens at nine in the morning and closes at six in the evening. "
    "On Sundays the library opens at eleven in the morning and closes at four in the afternoon.",
    "Write a Python function that returns the sum of the squares of a list of numbers.",
    "Explain in three sentences why the sky is blue.",
)
SAME = 0.03  # speeds closer than this count as equal


@dataclass
class Measurement:
    """One way of decoding, and what it did with each prompt."""

    name: str
    results: list[Result] = field(default_factory=list)
    tokens: list[list[Token]] = field(default_factory=list)

    def total(self, count: str) -> float:
        """The sum of one of the statistics over all prompts."""
        return sum(getattr(result.stats, count) for result in self.results)

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.total("num_tokens") / max(self.total("decode_ms"), 1e-9)

    @property
    def tokens_per_full_pass(self) -> float:
        return self.total("num_tokens") / max(self.total("num_full_passes"), 1)

    def num_same(self, other: Measurement) -> int:
        """How many prompts got the same tokens in both."""
        pairs = zip(self.results, other.results, strict=True)
        return sum(mine.tokens == theirs.tokens for mine, theirs in pairs)


def ways(three_tiers: LanguageModel) -> dict[str, LanguageModel]:
    """Plain decoding and two tiers beside the three given, all on the same model."""

    def without_slim(drafter: Drafter | None) -> LanguageModel:
        lm = three_tiers
        return LanguageModel(
            lm.model, lm.tokenizer, drafter=drafter, speculation=lm.speculation, eos_token_ids=lm.eos_token_ids
        )

    return {
        "plain": without_slim(None),
        "two tiers": without_slim(three_tiers.drafter),
        "three tiers": three_tiers,
    }


def measure(
    models: dict[str, LanguageModel], prompts: Sequence[str], max_new_tokens: int, report: Report
) -> list[Measurement]:
    """Decode every prompt greedily in every way, ways interleaved, after a short warm-up of each."""
    measurements = [Measurement(name) for name in models]
    total = len(prompts) * len(models) * max_new_tokens
    done = 0
    for lm in models.values():
        report("warming up", 0, total)
        lm.generate(chat(lm, prompts[0]), max_new_tokens=4)
    for number, prompt in enumerate(prompts, start=1):
        for measurement, lm in zip(measurements, models.values(), strict=True):
            stream = lm.stream(chat(lm, prompt), max_new_tokens=max_new_tokens)
            tokens = []
            for token in stream:
                tokens.append(token)
                report(f"prompt {number}: {measurement.name}", done + len(tokens), total)
            done += max_new_tokens
            measurement.tokens.append(tokens)
            measurement.results.append(stream.result)
    return measurements


def chat(lm: LanguageModel, prompt: str) -> str | list[dict[str, str]]:
    """The prompt as a user's turn where the model has a chat template, as raw text where it has none."""
    return [{"role": "user", "content": prompt}] if getattr(lm.tokenizer, "chat_template", None) else prompt


def show(console: Console, lm: LanguageModel, prompts: Sequence[str], measurements: Sequence[Measurement]) -> None:
    """What pays here, the text of three tiers in their colours, the legend, the table, and why."""
    plain, two_tiers, three_tiers = measurements
    drafter = lm.drafter.name if lm.drafter else "nothing"
    console.print(f"{lm.name} on {lm.model.device}, greedy, {len(prompts)} prompts.")
    console.print(fastest(measurements), style="bold")
    console.print(f"Two tiers: {drafter} drafts, the full model checks.")
    if lm.route:
        console.print(f"Three tiers (shown): a slim tier, which {bypass_words(lm.route)}, checks in between.")
    console.print()
    for prompt, tokens in zip(prompts, three_tiers.tokens, strict=True):
        console.print(Text(f"> {prompt}", style="dim"))
        console.print(tiered_text(tokens))
        console.print()
    tiers: list[Tier] = [tier for result in three_tiers.results for tier in result.tiers]
    console.print(legend(tiers))
    console.print()
    console.print(comparison(measurements))
    console.print()
    for sentence in verdicts(plain, two_tiers, three_tiers, slim_cost(lm.model, lm.route)):
        console.print(sentence)


def fastest(measurements: Sequence[Measurement]) -> str:
    """Which way won on this machine, in a sentence; plain decoding comes first."""
    plain, best = measurements[0], max(measurements, key=lambda own: own.tokens_per_second)
    speed = f"{best.tokens_per_second:.1f} tokens/s"
    if best is plain:
        return f"Fastest here: plain decoding, {speed}."
    return f"Fastest here: {best.name}, {speed}, {best.tokens_per_second / plain.tokens_per_second:.2f} times plain."


def comparison(measurements: Sequence[Measurement]) -> Table:
    """Speed, tokens per full pass and passes per tier, beside plain decoding, which comes first."""
    plain = measurements[0]
    headings = (
        "",
        "tokens/s",
        "tokens per\nfull pass",
        "draft\npasses",
        "slim\npasses",
        "full\npasses",
        "same as\nplain",
    )
    table = plain_table(*headings)
    for measurement in measurements:
        passes = (f"{measurement.total(f'num_{tier}_passes'):.0f}" for tier in ("draft", "slim", "full"))
        num_same, num_prompts = measurement.num_same(plain), len(plain.results)
        same = "yes" if num_same == num_prompts else f"{num_same} of {num_prompts}"
        speeds = f"{measurement.tokens_per_second:.1f}", f"{measurement.tokens_per_full_pass:.2f}"
        table.add_row(measurement.name, *speeds, *passes, "" if measurement is plain else same)
    return table


def verdicts(
    plain: Measurement, two_tiers: Measurement, three_tiers: Measurement, slim_pass_cost: float
) -> Iterator[str]:
    """Whether the drafter pays, then whether the slim tier pays on top of it, in sentences, from what was measured.

    ``slim_pass_cost``: time of a slim pass relative to a full pass of as many rows.
    """
    drafter_gain = two_tiers.tokens_per_second / plain.tokens_per_second
    yield f"The drafter {_pays(drafter_gain)} here: {drafter_gain:.2f} times the speed of plain decoding."
    slim_gain = three_tiers.tokens_per_second / two_tiers.tokens_per_second
    full_passes = [f"{measurement.total('num_full_passes'):.0f}" for measurement in (two_tiers, three_tiers)]
    yield (
        f"The slim tier {_pays(slim_gain)} here: {slim_gain:.2f} times the speed of two tiers. A slim pass takes "
        f"{slim_pass_cost:.2f} of the time of a full pass of as many rows, and "
        f"{three_tiers.total('num_slim_passes'):.0f} of them brought the full passes from {full_passes[0]} to "
        f"{full_passes[1]}."
    )


def _pays(gain: float) -> str:
    if abs(gain - 1) <= SAME:
        return "makes no difference"
    return "pays" if gain > 1 else "does not pay"
