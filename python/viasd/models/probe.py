"""The probe at load: a model's passes over token slots must equal its plain forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from viasd.errors import UnsupportedModel
from viasd.models.base import Model, Rows

LENGTH = 12


def probe(model: Model, module: Any) -> None:
    """Compare ``model``'s passes, a rollback and a tree among them, with the plain forward of ``module``.

    Raises:
        UnsupportedModel: they differ or fail, or logits are not finite.
    """
    ids = [(7 * i + 3) % model.vocab_size for i in range(LENGTH)]
    kind = type(module).__name__
    try:
        with torch.inference_mode():
            plain = module(torch.tensor([ids], device=model.device), use_cache=False).logits[0]
        slots = _logits_over_slots(model, ids)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UnsupportedModel(
            f"{model.name} ({kind}): its forward does not run over a slot cache: {reason}"
        ) from error
    if not torch.isfinite(plain).all():
        raise UnsupportedModel(f"{model.name} ({kind}): logits are not finite; the weights hold NaN or infinity")
    difference = (plain - slots).abs().max().item()
    limit = (1e-3 if plain.dtype == torch.float32 else 5e-2) * max(1.0, plain.abs().max().item())
    if not difference <= limit:
        raise UnsupportedModel(
            f"{model.name} ({kind}): logits over a slot cache differ from the plain forward's by {difference:.3g} "
            f"(limit {limit:.3g}); the model's attention does not follow explicit positions and masks"
        )


def _logits_over_slots(model: Model, ids: Sequence[int]) -> torch.Tensor:
    """[LENGTH, V]: a chain, wrong rows that are dropped again, then a tree with a wrong sibling at every level."""
    cache = model.new_cache()
    half = LENGTH // 2
    context = cache.pool.take(half)[::-1]
    head = model.forward(Rows(ids[:half], range(half), [0, half], context, [[]]), cache).logits
    wrong = cache.pool.take(2)
    model.forward(Rows(ids[:2], [half, half + 1], [0, 2], wrong, [context]), cache)
    cache.pool.give(wrong)
    tokens, positions, parents = [ids[half]], [half], [-1]
    for depth in range(1, LENGTH - half):
        tokens += [(ids[half + depth] + 1) % model.vocab_size, ids[half + depth]]
        positions += [half + depth] * 2
        parents += [2 * depth - 2] * 2
    slots = cache.pool.take(len(tokens))
    tree = Rows(tokens, positions, [0, len(tokens)], slots, [context], parents)
    return torch.cat([head, model.forward(tree, cache).logits[::2]])
