"""The decode loop."""

from viasd.decode.admission import Admission
from viasd.decode.draft_length import Costs, measure_costs, slim_cost
from viasd.decode.gate import Gate
from viasd.decode.loop import DecodeRun
from viasd.decode.request import Request, Result, Speculation, Tier, Token, TokenLogprobs
from viasd.decode.stats import Stats

__all__ = [
    "Admission",
    "Costs",
    "DecodeRun",
    "Gate",
    "Request",
    "Result",
    "Speculation",
    "Stats",
    "Tier",
    "Token",
    "TokenLogprobs",
    "measure_costs",
    "slim_cost",
]
