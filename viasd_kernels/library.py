"""Registration of ops with torch: one schema string each, in a namespace that follows the package's name."""

from typing import Any, Callable

import torch

NAMESPACE = __name__.split(".")[0].replace("-", "_")


def register_op(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Define ``schema`` (without namespace), give it ``body`` on every device and ``fake`` for tracing; return the op.

    Plain ``define`` + ``impl``: ``torch.library.custom_op`` costs about four times as much per call.
    """
    name = f"{NAMESPACE}::{schema.split('(', 1)[0]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, "CompositeExplicitAutograd", body)
    torch.library.register_fake(name, fake)
    return getattr(getattr(torch.ops, NAMESPACE), schema.split("(", 1)[0]).default
