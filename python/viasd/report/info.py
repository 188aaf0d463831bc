"""What `viasd info` prints: the model, its tiers, the kernels, devices and versions, and why each was chosen."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

import viasd_kernels as kernels
from viasd.errors import ModelNotInstalled
from viasd.language_model import LanguageModel
from viasd.models.embedded import NAME, converted_model, find_source
from viasd.report.terminal import bypass_words, plain_table

PACKAGES = ("viasd", "torch", "transformers", "triton")
IMPLEMENTATIONS = ("native", "triton", "reference")


def embedded_state() -> str | None:
    """Why the embedded default cannot be described yet; None once it is converted."""
    try:
        if converted_model() is not None:
            return None
        find_source()
    except ModelNotInstalled as error:
        return str(error)
    return f"{NAME} is installed and not converted yet: the first `viasd demo` or `viasd generate` does that, once."


def show(console: Console, lm: LanguageModel | None, missing: str | None = None) -> None:
    """Print the description of this installation; `missing` stands where there is no model to describe."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for heading, words in environment():
        table.add_row(Text(heading, style="bold"), Text(words))
    for heading, words in describe(lm) if lm else [("model", missing or "")]:
        table.add_row(Text(heading, style="bold"), Text(words))
    console.print(table)
    console.print()
    console.print(kernel_table(lm.model.device if lm else torch.device("cpu")))
    console.print(
        "auto: Triton for CUDA tensors, native C++ for CPU tensors, the PyTorch reference where there is none."
    )


def environment() -> Iterator[tuple[str, str]]:
    """Versions and devices."""
    yield (
        "versions",
        ", ".join([f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in PACKAGES)]),
    )
    processor = f"CPU with {torch.backends.cpu.get_cpu_capability()}, threads: {torch.get_num_threads()}"
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if cards:
        yield "devices", f"{processor}; {', '.join(cards)}: models run on the first CUDA device"
    else:
        yield "devices", f"{processor}; no CUDA device, so models run on the CPU, in float32"


def describe(lm: LanguageModel) -> Iterator[tuple[str, str]]:
    """The model, the forward path it takes and why, and what each tier is."""
    model, route = lm.model, lm.route
    yield (
        "model",
        f"{lm.name}: {model.num_layers} layers, {model.vocab_size:,} tokens, context {model.max_positions:,}, "
        f"on {model.device}",
    )
    yield "forward", f"{model.implementation}: {model.reason}"
    drafter = lm.drafter.name if lm.drafter else "none"
    yield (
        "draft",
        f"{drafter} (the default of --drafter), up to {lm.speculation.gamma} tokens a cycle, as many as pay here",
    )
    if route is not None:
        yield (
            "slim",
            f"{bypass_words(route)}; off unless --route asks for it, as it pays only where it is cheap",
        )
    yield "full", f"all {model.num_layers} layers; it verifies every token, so the output is its own"


def kernel_table(device: torch.device) -> Table:
    """Which implementations of each op run here (each is tried), and which one "auto" takes."""
    table = plain_table("op", "auto takes", "runs here")
    for name, call in _smallest_calls(device).items():
        running = [impl for impl in IMPLEMENTATIONS if _runs(call, impl)]
        preferred = "triton" if device.type == "cuda" else "native"
        table.add_row(name, preferred if preferred in running else "reference", ", ".join(running))
    decoder = kernels.SkipDecoder.available(device, torch.float32)
    table.add_row("SkipDecoder", "native" if "native" in decoder else "reference", ", ".join(reversed(decoder)))
    return table


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _runs(call: Callable[..., object], impl: str) -> bool:
    try:
        call(impl=impl)
    except (NotImplementedError, ImportError):  # the op has no such implementation, or the extension is not built
        return False
    return True


def _smallest_calls(device: torch.device) -> Mapping[str, Callable[..., object]]:
    """A call of each op with one row, all arguments given but `impl`."""
    tensor = partial(torch.tensor, device=device)
    row, row_start, zero = tensor([0]), tensor([0, 1]), tensor([0.0])
    logits, coin = tensor([[0.0, 0.0]]), tensor([0.5], dtype=torch.float64)
    tree = kernels.build_tree(tensor([-1]), row_start, max_rows=1, impl="reference")
    rows = (row, logits, coin, row_start)
    head, cache = tensor([[[0.0]]]), tensor([[[[0.0]]]])
    gate, keep = kernels.Gate("ratio", tensor([0.6]), tensor([0.3])), tensor([True])
    return {
        "bypass_norm": partial(kernels.bypass_norm, logits, logits, keep, logits[0], eps=1.0),
        "bypass_linear": partial(kernels.bypass_linear, logits, logits, keep),
        "accept_chain": partial(kernels.accept_chain, *rows, temperature=zero),
        "acceptance_stats": partial(kernels.acceptance_stats, logits, logits, row, temperature=zero),
        "gate_tiers": partial(kernels.gate_tiers, *rows, gate=gate, temperature=zero),
        "build_tree": partial(kernels.build_tree, tensor([-1]), row_start, max_rows=1),
        "verify_tree": partial(kernels.verify_tree, tree, *rows, temperature=zero),
        "tree_attention": partial(
            kernels.tree_attention, head, head, head, tensor([[0]]), row, row_start, tree.ancestors, scale=1.0
        ),
        "compact_kv": partial(kernels.compact_kv, cache, cache.clone(), row, row, row_start, row),
    }
