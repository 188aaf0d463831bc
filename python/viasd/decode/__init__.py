"""The decode loop."""

from viasd.decode.gate import Gate
from viasd.decode.loop import DecodeRun
from viasd.decode.request import Request, Result, Speculation, Tier, Token
from viasd.decode.stats import Stats

__all__ = ["DecodeRun", "Gate", "Request", "Result", "Speculation", "Stats", "Tier", "Token"]
