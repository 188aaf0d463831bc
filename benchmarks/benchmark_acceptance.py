"""Time of the acceptance ops beside the bytes they must move.

Every drafted token is accepted, so that all rows are read. "torch" is the plain expression of the same rule.

    python benchmarks/benchmark_acceptance.py --device cpu
"""

from __future__ import annotations

import torch

import peers
from measure import Report, arguments_parser
from timing import DTYPES, Cases, cold
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
    count = accepted.int().cumprod(0).sum(0, keepdim=True)
    last_p, last_q = p.index_select(0, count)[0], q.index_select(0, count)[0]
    left = torch.where(count < len(ids), (last_q - last_p).relu(), last_q)
    running = left.cumsum(0, dtype=torch.float64)
    return torch.searchsorted(running, coins[:1] * running[-1:])


def torch_gate(tokens: torch.Tensor, slim: torch.Tensor, coins: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """One sequence under "ratio": the regions, and a draw from the last row."""
    q = slim.float().softmax(-1)
    ratio = q[:-1].gather(1, tokens[1:].long().unsqueeze(1))[:, 0] / q[:-1].amax(-1)
    running = q[-1].cumsum(0, dtype=torch.float64)
    return torch.bucketize(ratio, bounds), torch.searchsorted(running, coins[:1] * running[-1:])


def measure(cases: Cases, rows: int, vocabulary: int, dtype_name: str) -> None:
    device, dtype = cases.device, DTYPES[dtype_name]
    generator = torch.Generator(device).manual_seed(rows)
    logits = 2 * torch.randn(rows, vocabulary, generator=generator, device=device)
    target = logits.to(dtype)
    draft = (logits + 0.1 * torch.randn(rows, vocabulary, generator=generator, device=device)).to(dtype)
    tokens = torch.cat([torch.zeros_like(target[:1, 0], dtype=torch.long), target[:-1].argmax(-1)]).int()
    coins = torch.full((rows,), 1e-3, dtype=torch.float64, device=device)  # small: every drafted token is accepted
    coins[0] = 0.5
    row_start, one = torch.tensor([0, rows], device=device), torch.ones(1, device=device)
    temperature, bounds = torch.ones(rows, device=device), torch.tensor([0.3, 0.6], device=device)
    gate = Gate("ratio", bounds[1:], bounds[:1])
    targets, drafts = (cold(logits, cases.buffer_bytes // 2) for logits in (target, draft))

    def pair(turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        return drafts[turn % len(drafts)], targets[turn % len(targets)]

    def stats(impl: str, turn: int = 0):
        return acceptance_stats(*pair(turn), tokens, temperature=temperature, impl=impl, check=False)

    def chain(impl: str, turn: int = 0):
        draft, target = pair(turn)
        options = {"temperature": one, "draft_logits": draft, "impl": impl, "check": False}
        return accept_chain(tokens, target, coins, row_start, **options)

    def tiers(impl: str, turn: int = 0):
        options = {"gate": gate, "temperature": one, "impl": impl, "check": False}
        return gate_tiers(tokens, pair(turn)[1], coins, row_start, **options)

    row_bytes = vocabulary * dtype.itemsize
    case = f"{rows} x {vocabulary:,}"
    # Normalisers, then the sums or the draw; what of a row pair stays on chip is read once.
    for op, call, num_bytes, expression, arguments in (
        ("acceptance_stats", stats, 2 * rows * row_bytes, torch_stats, lambda turn: (*pair(turn), tokens)),
        (
            "accept_chain",
            chain,
            (2 * rows - 1) * row_bytes,
            torch_chain,
            lambda turn: (tokens, pair(turn)[1], coins, pair(turn)[0]),
        ),
        ("gate_tiers", tiers, rows * row_bytes, torch_gate, lambda turn: (tokens, pair(turn)[1], coins, bounds)),
    ):
        found = cases.implementations(call, what=f"{op}, {case}, {dtype_name}")
        ways = {impl: lambda turn, call=call, impl=impl: call(impl, turn) for impl in found}
        if op == "accept_chain" and rows > 1 and cases.peers:
            ways |= peers.chain_ways(targets, drafts, tokens)
        cases.measure(op, case, dtype_name, num_bytes, {**ways, **cases.torch_ways(expression, arguments)})


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
