"""What viasd raises. Every message names the argument, what was expected and what came."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from viasd.decode.request import Result


class ViasdError(Exception):
    """Base of everything that viasd raises on purpose."""


class InvalidInput(ViasdError, ValueError):
    """An argument has a value that cannot work."""


class UnsupportedModel(ViasdError):
    """The model's forward cannot run in packed rows over a slot cache, or its weights are broken."""


class ModelNotInstalled(ViasdError, RuntimeError):
    """The package that carries the embedded default model, or what reads it, is missing."""


class RouteMismatch(ViasdError, ValueError):
    """A route was made for another model."""


class DecodeError(ViasdError, RuntimeError):
    """A request could not be finished. ``results`` holds what every request of the call had generated."""

    def __init__(self, message: str, results: list[Result]) -> None:
        super().__init__(message)
        self.results = results


class DecodeInterrupted(KeyboardInterrupt):
    """Ctrl-C while decoding. ``results`` holds what every request of the call had generated."""

    def __init__(self, results: list[Result]) -> None:
        super().__init__()
        self.results = results


class ApproximateOutput(UserWarning):
    """Decoding by a rule that does not reproduce the full model's distribution; shown once."""

    def __init__(self) -> None:
        super().__init__(
            "mode='tiered' approximates the full model: what the gate lets pass is never checked by it. Compare the "
            "output with mode='exact' before you rely on it"
        )
