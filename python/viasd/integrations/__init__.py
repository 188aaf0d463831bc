"""Ways into other libraries."""

from pathlib import Path

from viasd.integrations.transformers_generate import TransformersGenerate, transformers_generate

# A folder that Transformers takes as `custom_generate=`, for those who keep it beside a model or on a hub.
HUB_FOLDER = Path(__file__).parent / "hub"

__all__ = ["HUB_FOLDER", "TransformersGenerate", "transformers_generate"]
