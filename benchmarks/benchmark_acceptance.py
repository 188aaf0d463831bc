"""Time of the acceptance ops beside the bytes they must move.

Every drafted token is accepted, so that all rows are read. "torch" is the plain expression of the same rule.

    python benchmarks/benchmark_acceptance.py
"""

from __future__ import annotations

import torch

from measure import DTYPES, Report, arguments_parser, cold, implementations
from viasd_kernels import Gate, accept_chain, acceptance_stats, gate_tiers


def torch_stats(draft: torch.Tensor, target: torch.Tensor, tokens: torch.Tensor) -> list[torch.Tensor]:
    log_p, log_q = draft.float().log_softmax(-1), target.float().log_softmax(-1)
    p, q, ids = log_p.exp(), log_q.exp(), tokens.long().unsqueeze(1)
    apart = log_p - log_q
    over = (p * (apart + 0.5).relu()).sum(-1) + (q * (apart + 0.3).relu()).sum(-1)
    return [
        (p * apart).sum(-1),
        (q * -apart).sum(-1),
        (p - q).abs().sum(-1) / 2,
        over,
        q.gather(1, ids) / q.amax(-1, keepdim=True),
        log_p.gather(1, ids),
        target.argmax(-1),
        -(p * log_p).sum(-1),
        -(q * log_q).sum(-1),
    ]


def torch_chain(tokens: torch.Tensor, target: torch.Tensor, coins: torch.Tensor, draft: torch.Tensor) -> torch.Tensor:
    """One sequence: every decision at once, then one draw."""
    p, q, ids = draft.float().softmax(-1), target.float().softmax(-1), tokens[1:].long().unsqueeze(1)
    accepted = coins[1:] * p[:-1].gather(1, ids)[:, 0] < q[:-1].gather(1, ids)[:, 0]
    count = int(accepted.int().cumprod(0).sum())
    left = (q[count] - p[count]).relu() if count < len(ids) else q[count]
    running = left.cumsum(0, dtype=torch.float64)
    return torch.searchsorted(running, coins[:1] * running[-1])


def torch_gate(tokens: torch.Tensor, slim: torch.Tensor, coins: torch.Tensor) -> torch.Tensor:
    """One sequence under "ratio": the regions, and a draw from the last row."""
    q = slim.float().softmax(-1)
    ratio = q[:-1].gather(1, tokens[1:].long().unsqueeze(1))[:, 0] / q[:-1].amax(-1)
    running = q[-1].cumsum(0, dtype=torch.float64)
    return torch.bucketize(ratio, torch.tensor([0.3, 0.6])), torch.searchsorted(running, coins[:1] * running[-1])


def measure(report: Report, rows: int, vocabulary: int, dtype_name: str) -> None:
    dtype = DTYPES[dtype_name]
    generator = torch.Generator().manual_seed(rows)
    logits = 2 * torch.randn(rows, vocabulary, generator=generator)
    target = logits.to(dtype)
    draft = (logits + 0.1 * torch.randn(rows, vocabulary, generator=generator)).to(dtype)
    tokens = torch.cat([torch.zeros(1, dtype=torch.long), target[:-1].argmax(-1)]).int()
    coins = torch.full((rows,), 1e-3, dtype=torch.float64)  # so small that every drafted token is accepted
    coins[0] = 0.5
    row_start, one = torch.tensor([0, rows]), torch.ones(1)
    gate = Gate("ratio", torch.tensor([0.6]), torch.tensor([0.3]))
    targets, drafts = (cold(logits, report.buffer_bytes // 2) for logits in (target, draft))

    def stats(impl: str, turn: int = 0):
        pair = drafts[turn % len(drafts)], targets[turn % len(targets)]
        return acceptance_stats(*pair, tokens, temperature=torch.ones(rows), impl=impl, check=False)

    def chain(impl: str, turn: int = 0):
        options = {"temperature": one, "draft_logits": drafts[turn % len(drafts)], "impl": impl, "check": False}
        return accept_chain(tokens, targets[turn % len(targets)], coins, row_start, **options)

    def tiers(impl: str, turn: int = 0):
        options = {"gate": gate, "temperature": one, "impl": impl, "check": False}
        return gate_tiers(tokens, targets[turn % len(targets)], coins, row_start, **options)

    plain = {
        "acceptance_stats": lambda turn: torch_stats(drafts[turn % len(drafts)], targets[turn % len(drafts)], tokens),
        "accept_chain": lambda turn: torch_chain(
            tokens, targets[turn % len(targets)], coins, drafts[turn % len(drafts)]
        ),
        "gate_tiers": lambda turn: torch_gate(tokens, targets[turn % len(targets)], coins),
    }
    row_bytes = vocabulary * dtype.itemsize
    # Normalisers, then the sums or the draw; what of a row pair stays on chip is read once.
    floors = {
        "acceptance_stats": 2 * rows * row_bytes,
        "accept_chain": (2 * rows - 1) * row_bytes,
        "gate_tiers": rows * row_bytes,
    }
    case = f"{rows} x {vocabulary:,}"
    for op, call in (("acceptance_stats", stats), ("accept_chain", chain), ("gate_tiers", tiers)):
        found = implementations(call, what=f"{op}, {case}, {dtype_name}")
        ways = {impl: lambda turn, call=call, impl=impl: call(impl, turn) for impl in found}
        report.measure(op, case, dtype_name, floors[op], {**ways, "torch": plain[op]})


def main() -> None:
    parser = arguments_parser(__doc__)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[49_152, 151_936])
    arguments = parser.parse_args()
    report = Report("acceptance", arguments)
    for vocabulary in arguments.vocabularies:
        for dtype in arguments.dtypes:
            for rows in arguments.rows:
                measure(report, rows, vocabulary, dtype)
    report.finish()


if __name__ == "__main__":
    main()
