"""What a Transformers configuration says of a model as a whole."""

from __future__ import annotations

import hashlib
import json
from typing import Any

VOLATILE = (
    "transformers_version",
    "architectures",
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "use_cache",
    "_attn_implementation",
)


def config_hash(config: Any) -> str:
    """Identifies an architecture: a hash of the configuration without what may vary between copies."""
    content = {key: value for key, value in config.to_dict().items() if key not in VOLATILE}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def max_positions(config: Any) -> int:
    """The context. Past its original length, long rope takes other factors for all rows of a pass: not offered."""
    positions = int(getattr(config, "max_position_embeddings", None) or 2**31)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return positions
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    return min(positions, int(original or positions))


def eos_token_ids(module: Any) -> tuple[int, ...]:
    """The model's own end-of-sequence tokens."""
    config = getattr(module, "generation_config", None) or module.config
    eos = config.eos_token_id
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
