"""What proposes tokens."""

from viasd.drafters.base import Draft, DraftContext, Drafter, Verdict
from viasd.drafters.model import ModelDrafter, SelfDrafter
from viasd.drafters.prompt_lookup import PromptLookup

__all__ = ["Draft", "DraftContext", "Drafter", "ModelDrafter", "PromptLookup", "SelfDrafter", "Verdict"]
