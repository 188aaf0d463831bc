"""The probe at load: a model's passes over token slots must equal its plain forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from viasd.errors import UnsupportedModel
from viasd.models.base import Model, Rows

LENGTH = 48  # far enough for a changed rotary embedding to show


def plain_logits(name: str, module: Any, vocab_size: int, max_positions: int) -> torch.Tensor:
    """[n, V]: what the module itself makes of the probe's tokens.

    Raises:
        UnsupportedModel: its forward fails, or its logits are not finite.
    """
    with _failures_named(name, module), torch.inference_mode():
        ids = torch.tensor([_probe_ids(vocab_size, max_positions)], device=next(module.parameters()).device)
        plain: torch.Tensor = module(ids, use_cache=False).logits[0]
    if not torch.isfinite(plain).all():
        raise UnsupportedModel(
            f"{name} ({type(module).__name__}): logits are not finite; the weights hold NaN or infinity"
        )
    return plain


def probe(model: Model, module: Any, plain: torch.Tensor) -> None:
    """Compare ``model``'s passes, a rollback and a tree among them, with the plain forward of ``module``.

    Raises:
        UnsupportedModel: they differ or fail.
    """
    with _failures_named(model.name, module), torch.inference_mode():
        slots = _logits_over_slots(model, _probe_ids(model.vocab_size, model.max_positions))
    difference = (plain - slots).abs().max().item()
    limit = (1e-3 if plain.dtype == torch.float32 else 5e-2) * max(1.0, plain.abs().max().item())
    if not difference <= limit:
        raise UnsupportedModel(
            f"{model.name} ({type(module).__name__}): logits over a slot cache differ from the plain forward's by "
            f"{difference:.3g} (limit {limit:.3g}); the model's attention does not follow explicit positions and masks"
        )


def _probe_ids(vocab_size: int, max_positions: int) -> list[int]:
    return [(7 * i + 3) % vocab_size for i in range(min(LENGTH, max_positions))]


@contextmanager
def _failures_named(name: str, module: Any) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
        raise UnsupportedModel(
            f"{name} ({type(module).__name__}): its forward does not run over a slot cache: "
            f"{type(error).__name__}: {error}"
        ) from error


def _logits_over_slots(model: Model, ids: Sequence[int]) -> torch.Tensor:
    """[n, V]: a chain, wrong rows that are dropped again, then a tree with a wrong sibling at every level."""
    cache = model.new_cache()
    half = len(ids) // 2
    context = cache.pool.take(half)[::-1]
    head = model.forward(Rows(ids[:half], range(half), [0, half], context, [[]]), cache).logits
    wrong = cache.pool.take(2)
    model.forward(Rows(ids[:2], [half, half + 1], [0, 2], wrong, [context]), cache)
    cache.pool.give(wrong)
    tokens, positions, parents = [ids[half]], [half], [-1]
    for depth in range(1, len(ids) - half):
        tokens += [(ids[half + depth] + 1) % model.vocab_size, ids[half + depth]]
        positions += [half + depth] * 2
        parents += [2 * depth - 2] * 2
    slots = cache.pool.take(len(tokens))
    tree = Rows(tokens, positions, [0, len(tokens)], slots, [context], parents)
    return torch.cat([head, model.forward(tree, cache).logits[::2]])
