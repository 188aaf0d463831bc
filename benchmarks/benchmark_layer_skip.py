"""Time of the layer-skipping ops and of the whole decode step, beside the bytes they must move.

Ops have the shapes of the model. Of the whole step there are as many copies as fill the cold buffer, used in turn, so
that weights come from memory. Transformers' forward, with its own cache of the same context, is timed in the same
rounds; its cache is cropped back after each call, a matter of microseconds per layer.

    python benchmarks/benchmark_layer_skip.py --model path/of/a/folder

On a GPU it times the ops alone: the step there is gpu_check.py's.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from bypass_cases import linear_shapes, measure_linear, measure_norm
from measure import Report, arguments_parser
from timing import DTYPES, paired_ratio, percentiles
from timing import refuse_unless_close as compare
from viasd.models.embedded import embedded_model
from viasd.models.hf_mapping import decoder_config, decoder_weights
from viasd.report.terminal import plain_table
from viasd_kernels import KVPool, SkipDecoder


def logits_of(decoder: SkipDecoder, pool: KVPool, ids: torch.Tensor, context: int, **options: Any) -> torch.Tensor:
    """Of ids that follow ``context`` tokens of one sequence; the slots are the positions."""
    rows = len(ids)
    kv = pool.place([range(context)], range(context, context + rows), [0, rows])
    positions, row_start = torch.arange(context, context + rows), torch.tensor([0, rows])
    return decoder.forward(ids, positions, row_start, kv, check=False, **options).logits


class Model:
    """One copy of the weights: our decoder with its pool, and Transformers' model with its cache."""

    def __init__(self, module: torch.nn.Module, impl: str, num_slots: int, compact: bool) -> None:
        self.module = module
        self.compact = compact
        self.decoder = SkipDecoder(decoder_weights(module), decoder_config(module.config), impl=impl, compact=compact)
        self.pool = self.decoder.new_pool(num_slots)
        self.cache: Any = None

    def ours(self, ids: torch.Tensor, context: int, **options: Any) -> torch.Tensor:
        return logits_of(self.decoder, self.pool, ids, context, **options)

    def cut(self, num_layers: int) -> tuple[SkipDecoder, KVPool]:
        """The first layers of the model alone; it takes the place of a model in which the others cost nothing."""
        full = self.decoder.config
        dropped = tuple(f"layers.{layer}." for layer in range(num_layers, full.num_layers))
        weights = decoder_weights(self.module).items()
        kept = {name: tensor for name, tensor in weights if not name.startswith(dropped)}
        config = replace(full, layers=full.layers[:num_layers])
        decoder = SkipDecoder(kept, config, impl=self.decoder.implementation, compact=self.compact)
        return decoder, decoder.new_pool(self.pool.num_slots)

    @torch.no_grad()
    def theirs(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.module(ids.unsqueeze(0), past_key_values=self.cache, use_cache=True).logits[0]
        self.cache.crop(-len(ids))
        return logits

    @torch.no_grad()
    def prefill_theirs(self, ids: torch.Tensor) -> torch.Tensor:
        """The last token's logits; the cache is left as the model's own."""
        self.cache = DynamicCache(config=self.module.config)
        return self.module(ids.unsqueeze(0), past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits[0]

    def prefill_ours(self, ids: torch.Tensor) -> torch.Tensor:
        return self.ours(ids, 0, logits_rows=torch.tensor([len(ids) - 1]))


def load_copies(arguments: argparse.Namespace, dtype_name: str, buffer_bytes: int) -> list[Model]:
    """Native where there is such a step, else the reference."""
    module = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=DTYPES[dtype_name]).eval()
    size = sum(tensor.nbytes for tensor in module.parameters())
    num_slots = max([*arguments.contexts, *arguments.prefills]) + max(arguments.rows)
    compact = not arguments.as_given
    try:
        first = Model(module, "native", num_slots, compact)
    except NotImplementedError:
        first = Model(module, "reference", num_slots, compact)
    count = max(1, -(-buffer_bytes // size))
    impl = first.decoder.implementation
    return [first, *(Model(deepcopy(module), impl, num_slots, compact) for _ in range(count - 1))]


def weight_bytes(decoder: SkipDecoder, weights: Mapping[str, torch.Tensor]) -> int:
    """What a step reads of them: everything, but of an embedding that is not the head's only some rows."""
    total = sum(tensor.nbytes for tensor in weights.values())
    return total if decoder.config.tied_head else total - weights["embedding"].nbytes


def check_step(model: Model, dtype_name: str, ids: torch.Tensor, context: int) -> None:
    """The same logits as the reference's and, in float32, as Transformers'."""
    reference = SkipDecoder(decoder_weights(model.module), model.decoder.config, impl="reference")
    got, expected = model.ours(ids, context), logits_of(reference, model.pool, ids, context)
    if dtype_name == "float32":
        compare("SkipDecoder beside its reference", got, expected)
        compare("SkipDecoder beside Transformers", got, model.theirs(ids))
        return
    # In bfloat16 rounding adds up over the layers, so what is compared is the shape of the row.
    likeness = F.cosine_similarity(got.float(), expected.float(), dim=-1)
    if likeness.min() < 0.99:
        raise SystemExit(f"SkipDecoder: cosine {likeness.min():.4f} with the reference's logits, nothing is reported")


def measure_steps(report: Report, copies: Sequence[Model], context: int, dtype_name: str) -> list[dict[str, Any]]:
    """Steps of every number of rows, ours and Transformers', and those with all layers but the first bypassed."""
    model, rows = copies[0], report.arguments.rows
    decoder, config = model.decoder, model.decoder.config
    ids = torch.randint(config.vocab_size, (context + max(rows),), generator=torch.Generator().manual_seed(0))
    for copy in copies:
        copy.prefill_theirs(ids[:context])
        copy.prefill_ours(ids[:context])
    check_step(model, dtype_name, ids[context:], context)

    at = len(copies)
    chunks = {count: ids[context : context + count] for count in rows}
    route = [(layer == 0,) * 2 for layer in range(config.num_layers)]
    cuts = [copy.cut(1) for copy in copies]
    one = chunks[min(rows)]
    bypass_ways = {
        "cut": lambda turn: logits_of(*cuts[turn % at], one, context),
        "bypassed": lambda turn: copies[turn % at].ours(one, context, route=route),
    }
    weights = weight_bytes(decoder, decoder_weights(model.module))
    size = DTYPES[dtype_name].itemsize
    position_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * size
    steps = []
    rounds: dict[str, Any] = {}
    for count, chunk in chunks.items():
        rounds[f"ours {count}"] = lambda turn, chunk=chunk: copies[turn % at].ours(chunk, context)
        rounds[f"theirs {count}"] = lambda turn, chunk=chunk: copies[turn % at].theirs(chunk)
    times = report.interleaved(f"step, context {context:,}, {dtype_name}", {**rounds, **bypass_ways})
    for count in rows:
        ours, theirs = times[f"ours {count}"], times[f"theirs {count}"]
        num_bytes = weights + position_bytes * (context + count) + count * config.vocab_size * size
        case = f"{count} rows, context {context:,}"
        report.add("step", case, dtype_name, num_bytes, {decoder.implementation: ours, "Transformers": theirs})
        first = times[f"ours {min(rows)}"]
        steps.append(
            {
                "context": context,
                "dtype": dtype_name,
                "rows": count,
                "implementation": decoder.implementation,
                "p50_ms": percentiles(ours)["p50_ms"],
                "weight_bytes": weights,
                "stored_bytes": decoder.weight_bytes,
                "times_fewest_rows": paired_ratio(ours, first),
                "transformers_times_ours": paired_ratio(theirs, ours),
            }
        )
    full, short = (percentiles(times[name])["p50_ms"] for name in (f"ours {min(rows)}", "cut"))
    left = percentiles(times["bypassed"])["p50_ms"] - short
    steps[0]["bypassed_layers"] = config.num_layers - 1
    steps[0]["bypassed_layer_share"] = left / (full - short)
    return steps


def measure_prefill(report: Report, copies: Sequence[Model], length: int, dtype_name: str) -> None:
    decoder, config = copies[0].decoder, copies[0].decoder.config
    ids = torch.randint(config.vocab_size, (length,), generator=torch.Generator().manual_seed(1))
    ways = {
        decoder.implementation: lambda turn: copies[turn % len(copies)].prefill_ours(ids),
        "Transformers": lambda turn: copies[turn % len(copies)].prefill_theirs(ids),
    }
    weights = weight_bytes(decoder, decoder_weights(copies[0].module))
    report.measure("prefill", f"{length:,} tokens", dtype_name, weights, ways)


def print_steps(report: Report, steps: Sequence[dict[str, Any]]) -> None:
    """The step beside its floor: weight bytes by the read bandwidth of the whole run."""
    table = plain_table(
        "context", "dtype", "rows", "p50 ms", "floor ms", "step / floor", "times fewest rows", "HF / ours"
    )
    for step in steps:
        step["floor_ms"] = step["weight_bytes"] / report.bandwidth.bytes_per_ms("read")
        step["times_floor"] = step["p50_ms"] / step["floor_ms"]
        names = ("p50_ms", "floor_ms", "times_floor", "times_fewest_rows", "transformers_times_ours")
        numbers = (f"{step[name]:.2f}" for name in names)
        table.add_row(f"{step['context']:,}", step["dtype"], str(step["rows"]), *numbers)
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table)
    for step in steps:
        if "bypassed_layer_share" in step:
            share = f"{step['bypassed_layer_share']:.1%} of a full one"
            where = f"context {step['context']:,}, {step['dtype']}, {step['rows']} rows"
            console.print(
                f"a bypassed layer costs {share} ({where}, {step['bypassed_layers']} layers)", highlight=False
            )


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--model", type=Path, help="a folder; default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 2048])
    parser.add_argument("--prefills", type=int, nargs="*", default=[512, 1024], help="lengths of prompts")
    parser.add_argument("--skip", nargs="*", choices=("ops", "steps"), default=[], help="what not to measure")
    parser.add_argument("--as-given", action="store_true", help="store weights as given, not in fewer bytes")
    arguments = parser.parse_args()
    arguments.model = arguments.model or embedded_model()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore", FutureWarning)  # of `past_key_values`, whose new name older releases do not know
    report = Report("layer_skip_as_given" if arguments.as_given else "layer_skip", arguments)
    steps: list[dict[str, Any]] = []
    config = decoder_config(AutoConfig.from_pretrained(arguments.model))
    for dtype in arguments.dtypes:
        if "steps" not in arguments.skip and arguments.device == "cpu":
            copies = load_copies(arguments, dtype, report.buffer_bytes)
            for context in arguments.contexts:
                steps += measure_steps(report, copies, context, dtype)
            for length in arguments.prefills:
                measure_prefill(report, copies, length, dtype)
            del copies  # before the ops' buffers are made
        if "ops" not in arguments.skip:
            for rows in arguments.rows:
                measure_norm(report, rows, config.hidden_size, dtype)
                for name, shape in linear_shapes(config).items():
                    measure_linear(report, name, shape, rows, dtype)
    report.more["steps"] = steps
    print_steps(report, steps)
    report.finish()


if __name__ == "__main__":
    main()
