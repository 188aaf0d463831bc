"""Terminal pictures: text coloured by tier, its legend, progress bars, tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from viasd.decode import Tier, Token
from viasd.routing import Route

TIER_STYLES: dict[Tier, str] = {"draft": "green", "slim": "yellow", "full": "bold magenta"}
TIER_WORDS: dict[Tier, str] = {
    "draft": "proposed by the drafter, kept by every check",
    "slim": "decided by the slim tier, kept by the full model",
    "full": "decided by the full model itself",
}

Report = Callable[[str, int, int], None]


CONTROLS = {code: 0xFFFD for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def token_text(text: str, tier: Tier | None) -> Text:
    """A token's text in its tier's colour, without control characters: a model must not drive the terminal."""
    return Text(text.translate(CONTROLS), style=TIER_STYLES[tier] if tier else "")


def tiered_text(tokens: Iterable[Token]) -> Text:
    """The text of these tokens, each in the colour of the tier that decided it."""
    return Text.assemble(*(token_text(token.text, token.tier) for token in tokens))


def legend(tiers: Sequence[Tier]) -> Table:
    """What the colours mean, and which share of the tokens each tier decided."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="left")
    table.add_column(justify="right")
    counts = Counter(tiers)
    for tier, words in TIER_WORDS.items():
        if counts[tier]:
            share = f"{counts[tier] / len(tiers):.0%}"
            table.add_row(Text(tier, style=TIER_STYLES[tier]), share, words)
    return table


def bypass_words(route: Route) -> str:
    """What a route leaves out, in words."""
    attention, mlp = route.attention.count(False), route.mlp.count(False)
    return f"bypasses attention in {attention} and MLP in {mlp} of {route.num_layers} layers"


def plain_table(*headings: str) -> Table:
    """A table without vertical lines: words to the left, numbers to the right of their columns."""
    table = Table(box=SIMPLE, show_edge=False, pad_edge=False)
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i else "left", vertical="bottom")
    return table


@contextmanager
def progress_bar(console: Console) -> Iterator[Report]:
    """A bar that `report(step, done, total)` moves (total 0: unknown); gone at the end, not drawn off a terminal."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=24), TimeElapsedColumn()
    bar = Progress(*columns, console=console, transient=True, refresh_per_second=4, disable=not console.is_terminal)
    with bar:
        task = bar.add_task("starting", total=None)
        yield lambda step, done, total: bar.update(task, description=step, completed=done, total=total or None)
