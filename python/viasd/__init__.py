"""viasd: exact tiered speculative decoding.

import viasd

lm = viasd.load(drafter="prompt-lookup", route="default")
print(lm.generate([{"role": "user", "content": "What is a tide?"}], max_new_tokens=64).text)
"""

from viasd.decode import Admission, DecodeRun, Gate, Request, Result, Speculation, Stats, Token, TokenLogprobs
from viasd.drafters import Drafter, ModelDrafter, PromptLookup, SelfDrafter
from viasd.errors import (
    ApproximateOutput,
    DecodeError,
    DecodeInterrupted,
    InvalidInput,
    ModelNotInstalled,
    RouteMismatch,
    UnsupportedModel,
    ViasdError,
)
from viasd.integrations import transformers_generate
from viasd.language_model import LanguageModel, Stream, load
from viasd.models import Model, SkipModel, TransformersModel
from viasd.routing import Route
from viasd.sampling import Sampling

__all__ = [
    "Admission",
    "ApproximateOutput",
    "DecodeError",
    "DecodeInterrupted",
    "DecodeRun",
    "Drafter",
    "Gate",
    "InvalidInput",
    "LanguageModel",
    "Model",
    "ModelDrafter",
    "ModelNotInstalled",
    "PromptLookup",
    "Request",
    "Result",
    "Route",
    "RouteMismatch",
    "Sampling",
    "SelfDrafter",
    "SkipModel",
    "Speculation",
    "Stats",
    "Stream",
    "Token",
    "TokenLogprobs",
    "TransformersModel",
    "UnsupportedModel",
    "ViasdError",
    "load",
    "transformers_generate",
]
