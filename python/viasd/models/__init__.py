"""Models over token slots."""

from viasd.models.base import DecoderOutput, KVCache, Model, Rows, SlotPool, prefill
from viasd.models.skip_model import SkipModel
from viasd.models.transformers_model import TransformersModel

__all__ = ["DecoderOutput", "KVCache", "Model", "Rows", "SkipModel", "SlotPool", "TransformersModel", "prefill"]
