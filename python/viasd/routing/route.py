"""A route: which sub-layers of the full model the slim verifier keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from viasd.errors import InvalidInput, RouteMismatch

FORMAT = "viasd-route-1"


@dataclass(frozen=True)
class Route:
    """Two keep-masks over layers; a layer's attention or MLP that is not kept passes its input through.

    The layer mask z of VIA-SD (arXiv:2606.12243) is the case in which both masks agree. The first and the last layer
    are always kept.

    Args:
        attention: [L] bools, True where the layer's attention is kept.
        mlp: [L] bools, True where the layer's MLP is kept.
        model: name of the model that the route was made for, for people to read.
        revision: the model's revision, where it has one.
        config_hash: hash of the model's configuration; when given, the route is refused for any other model.
        score: what a search gave it, in the unit of its objective.
        settings: how it was made.
        calibration_hash: hash of the text that it was searched on.

    Raises:
        InvalidInput: masks of different lengths, of fewer than two layers, or without the first or the last layer.
    """

    attention: tuple[bool, ...]
    mlp: tuple[bool, ...]
    model: str = ""
    revision: str | None = None
    config_hash: str | None = None
    score: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    calibration_hash: str | None = None

    def __post_init__(self) -> None:
        for name in ("attention", "mlp"):
            mask = getattr(self, name)
            if not isinstance(mask, Sequence) or not all(isinstance(keep, bool) for keep in mask):
                raise InvalidInput(f"route: {name} must be a sequence of bools, got {mask!r}")
            object.__setattr__(self, name, tuple(mask))
        if len(self.attention) != len(self.mlp) or len(self.mlp) < 2:
            raise InvalidInput(
                "route: attention and mlp must have one entry per layer, at least 2; "
                f"got {len(self.attention)} and {len(self.mlp)}"
            )
        if not all(mask[i] for mask in (self.attention, self.mlp) for i in (0, -1)):
            raise InvalidInput("route: the first and the last layer must be kept")

    def __hash__(self) -> int:
        return hash((self.attention, self.mlp))

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def skip_ratio(self) -> float:
        """Share of the middle sub-layers that is bypassed."""
        middle = self.attention[1:-1] + self.mlp[1:-1]
        return middle.count(False) / len(middle) if middle else 0.0

    @classmethod
    def spread(cls, num_layers: int, *, attention: float, mlp: float) -> Route:
        """Bypass these shares of the middle layers' attentions and MLPs, evenly spread: before a search has run.

        Raises:
            InvalidInput: a share outside [0, 1], or fewer than two layers.
        """
        masks: list[tuple[bool, ...]] = []
        for name, share in (("attention", attention), ("mlp", mlp)):
            if not 0.0 <= share <= 1.0:
                raise InvalidInput(f"route: {name} must lie in [0, 1], got {share}")
            middle = max(num_layers - 2, 0)
            count = round(share * middle)
            bypassed = {1 + int((i + 0.5) * middle / count) for i in range(count)}
            masks.append(tuple(layer not in bypassed for layer in range(num_layers)))
        return cls(masks[0], masks[1], settings={"kind": "spread", "attention": attention, "mlp": mlp})

    def check(self, num_layers: int, config_hash: str, name: str) -> None:
        """Raise ``RouteMismatch`` when this route was made for another model."""
        if self.num_layers != num_layers:
            raise RouteMismatch(f"route: made for {self.num_layers} layers, but {name} has {num_layers}")
        if self.config_hash is not None and self.config_hash != config_hash:
            raise RouteMismatch(
                f"route: made for {self.model or 'another model'} (config {self.config_hash}), "
                f"not for {name} (config {config_hash})"
            )

    def save(self, path: str | Path) -> None:
        """Write the route as JSON."""
        content = {"format": FORMAT, **asdict(self)}
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Route:
        """Read a route written by ``save``.

        Raises:
            InvalidInput: no such file, not JSON, or not a route.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InvalidInput(f"route: cannot read {path}: {error}") from error
        if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
            raise InvalidInput(f"route: {path} is not a route file (expected format {FORMAT!r})")
        unknown = content.keys() - cls.__dataclass_fields__.keys()
        missing = {"attention", "mlp"} - content.keys()
        if unknown or missing:
            raise InvalidInput(f"route: {path}: unknown fields {sorted(unknown)}, missing fields {sorted(missing)}")
        return cls(**content)
