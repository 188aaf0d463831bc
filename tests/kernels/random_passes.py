"""Random passes over the sequences of several decoders, and how far their outputs and pools may be apart."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from native_cases import Driver, assert_as_good, flat, random_weights, same_bits

from viasd_kernels.layer_skip import DecoderConfig, DecoderOutput, SkipDecoder

PROMPTS = (0, 1, 3, 40, 64, 65, 130, 260)  # tiles of 64 keys, splits of 256


def check_decoder(
    impl: str,
    config: DecoderConfig,
    dtype: torch.dtype,
    seed: int,
    prompts: Sequence[int] = PROMPTS,
    device: torch.device | str = "cpu",
) -> None:
    """A decoder errs at most twice as much as the reference, on the CPU, in a prompt and three passes after it."""
    rng, weights = Random(seed), random_weights(config, dtype, seed)
    on_device = {name: weight.to(device) for name, weight in weights.items()}
    wide = {name: weight.double() for name, weight in weights.items()}
    count = rng.randrange(1, 4)
    passes = Passes(config, rng, count, prompts)
    decoders = [
        SkipDecoder(on_device, config, impl=impl),
        SkipDecoder(weights, config, impl="reference"),
        SkipDecoder(wide, config, impl="reference"),
    ]
    drivers = [Driver(decoder, count, num_slots=900, seed=seed) for decoder in decoders]
    for number in range(4):
        tokens, options = passes.next() if number else passes.prompt()
        before = [store.cpu().clone() for store in (drivers[0].pool.keys, drivers[0].pool.values)]
        compare(*(driver.run(tokens, **options) for driver in drivers), tokens, options)
        compare_pools(drivers, before, options)
        paths = passes.accept(tokens, options)
        for driver in drivers:
            driver.keep(paths)


class Passes:
    """Random passes that keep the rules: a row attends only where its parent and its context's rows did."""

    def __init__(self, config: DecoderConfig, rng: Random, count: int, prompts: Sequence[int]) -> None:
        self.config, self.rng, self.count, self.prompts = config, rng, count, prompts
        # Which layers' attention all of a sequence's context kept.
        self.attended = [[True] * config.num_layers for _ in range(count)]

    def prompt(self) -> tuple[list[list[int]], dict]:
        return [self.tokens(self.rng.choice(self.prompts)) for _ in range(self.count)], {}

    def next(self) -> tuple[list[list[int]], dict]:
        tokens = [self.tokens(self.rng.choice([0, 1, 2, 5, 19])) for _ in range(self.count)]
        options: dict = {"capture_layers": self.rng.sample(range(self.config.num_layers + 1), 2)}
        if self.rng.random() < 0.7:
            options["parents"] = [[self.rng.randrange(i) if i else -1 for i in range(len(own))] for own in tokens]
        rows = sum(map(len, tokens))
        if rows and self.rng.random() < 0.5:
            options["logits_rows"] = torch.tensor([self.rng.randrange(rows) for _ in range(3)])
        kind = self.rng.choice(["full", "route", "row_route"])
        if kind == "route" and all(map(all, self.attended)):
            options["route"] = [(self.rng.random() < 0.7, self.rng.random() < 0.7) for _ in self.config.layers]
        elif kind == "row_route" or not all(map(all, self.attended)):
            options["row_route"] = self.row_route(tokens, options.get("parents"))
        return tokens, options

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(-1, self.config.vocab_size) for _ in range(count)]

    def row_route(self, tokens: list[list[int]], parents: list[list[int]] | None) -> torch.Tensor:
        rows = []
        for number, own in enumerate(tokens):
            kept: list[list[bool]] = []
            for row in range(len(own)):
                parent = row - 1 if parents is None else parents[number][row]
                above = kept[parent] if parent >= 0 else self.attended[number]
                kept.append([keep and self.rng.random() < 0.8 for keep in above])
            rows += [[(attention, self.rng.random() < 0.7) for attention in keeps] for keeps in kept]
        return torch.tensor(rows, dtype=torch.bool).reshape(-1, self.config.num_layers, 2)

    def accept(self, tokens: list[list[int]], options: dict) -> list[list[int]]:
        """Per sequence the path to some row, or nothing."""
        paths, first = [], 0
        for number, own in enumerate(tokens):
            path: list[int] = []
            row = self.rng.randrange(-1, len(own))
            while row >= 0:
                path.insert(0, row)
                row = row - 1 if "parents" not in options else options["parents"][number][row]
            for row in path:
                for layer in range(self.config.num_layers):
                    self.attended[number][layer] &= bool(_keeps(options, first + row, layer))
            paths.append(path)
            first += len(own)
        return paths


def _keeps(options: dict, row: int, layer: int) -> bool:
    """Whether this row of a pass keeps the layer's attention."""
    if "row_route" in options:
        return bool(options["row_route"][row, layer, 0])
    return "route" not in options or options["route"][layer][0]


def compare(
    got: DecoderOutput, same_dtype: DecoderOutput, exact: DecoderOutput, tokens: list[list[int]], options: dict
) -> None:
    """All but the unused rows: they begin with zeros, and a norm of the little that follows magnifies any rounding."""
    assert exact.logits.isfinite().all()
    layers = {layer: captured.cpu() for layer, captured in got.captured.items()}
    got = DecoderOutput(got.hidden.cpu(), got.logits.cpu(), layers)
    used = torch.tensor(flat(tokens), dtype=torch.int64) >= 0
    scored = used[options.get("logits_rows", slice(None))]
    assert_as_good(got.hidden[used], same_dtype.hidden[used], exact.hidden[used])
    assert_as_good(got.logits[scored], same_dtype.logits[scored], exact.logits[scored])
    assert got.captured.keys() == exact.captured.keys() == set(options.get("capture_layers", ()))
    for layer, captured in got.captured.items():
        assert_as_good(captured[used], same_dtype.captured[layer][used], exact.captured[layer][used])


def compare_pools(drivers: list[Driver], before: list[torch.Tensor], options: dict) -> None:
    """The rows' slots hold their keys and values in the layers whose attention they keep; no other bit changed."""
    written = torch.zeros(before[0].shape[:2], dtype=torch.bool)
    for row, slot in enumerate(flat(drivers[0].row_slots)):
        for layer in range(len(written)):
            written[layer, slot] = _keeps(options, row, layer)
    stores = [(driver.pool.keys.cpu(), driver.pool.values.cpu()) for driver in drivers]
    for old, got, same_dtype, exact in zip(before, *stores, strict=True):
        assert same_bits(got[~written], old[~written])
        assert_as_good(got[written], same_dtype[written], exact[written])
