"""Random requests as SGLang and vLLM hand them over."""

from types import SimpleNamespace

import torch

POISON = -77


def linked(parents: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """retrive_index, retrive_next_token and retrive_next_sibling of B trees of N nodes; a parent of -2: no link."""
    batch, nodes = len(parents), len(parents[0])
    next_token, next_sibling = torch.full((2, batch, nodes), -1)
    for request, own in enumerate(parents):
        for node in reversed(range(1, nodes)):
            if own[node] >= 0:
                next_sibling[request, node] = next_token[request, own[node]]
                next_token[request, own[node]] = node
    return torch.arange(batch * nodes).view(batch, nodes), next_token, next_sibling


def random_parents(seed: int, batch: int, nodes: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)

    def parent(node: int) -> int:
        own = int(torch.randint(max(-1, node - 4), node, (), generator=generator))
        return own if own >= 0 else -2

    return [[-1, *(parent(node) for node in range(1, nodes))] for _ in range(batch)]


def outputs(batch: int, nodes: int, steps: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    predicts = torch.full((batch * nodes,), POISON, dtype=torch.int32)
    return predicts, torch.full((batch, steps), -1, dtype=torch.int32), torch.full((batch,), POISON, dtype=torch.int32)


def v2_batch(seed: int, has_draft: bool, steps: int = 4, vocab: int = 7) -> dict:
    """Six requests of up to `steps` drafted tokens, two of them greedy; states in another order, some unused."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, steps + 2, (6,), generator=generator)
    rows, states = int(lengths.sum()), 9
    idx_mapping = torch.randperm(states, generator=generator)[:6].int()
    local = torch.cat([torch.arange(int(n)) for n in lengths])
    request = torch.repeat_interleave(lengths)
    draft_logits = torch.randn(states, steps, vocab, generator=generator) * 2
    temperature = torch.tensor([0.6, 1.0, 1.7, 0.8, 1.0, 1.3, 0.9, 1.1, 2.0])
    temperature[idx_mapping[:2].long()] = 0.0
    law = (draft_logits / temperature.clamp(min=0.1).view(-1, 1, 1)).softmax(-1)
    rows_law = law[idx_mapping.long()[request], (local - 1).clamp(min=0)]
    drafted = torch.multinomial(rows_law, 1, generator=generator).squeeze(1).int()
    drafted[torch.rand(rows, generator=generator) < 0.1] = -1
    target = torch.randn(rows, vocab, generator=generator) + 2 * torch.nn.functional.one_hot(
        drafted.clamp(min=0).roll(-1).long(), vocab
    )
    target[torch.rand(target.shape, generator=generator) < 0.1] = float("-inf")
    return {
        "target_logits": target,
        "draft_logits": draft_logits if has_draft else None,
        "draft_sampled": drafted,
        "cu_num_logits": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        "pos": (local + 100 * request + seed).long(),
        "idx_mapping": idx_mapping,
        "expanded_idx_mapping": idx_mapping[request],
        "expanded_local_pos": local.int(),
        "temperature": temperature,
        "seed": torch.randint(-(2**62), 2**62, (states,), generator=generator),
        "num_speculative_steps": steps,
    }  # fmt: skip


def metadata(temperature, all_greedy=False, generators=None) -> SimpleNamespace:
    return SimpleNamespace(
        temperature=temperature, all_greedy=all_greedy, all_random=False, generators=generators or {}
    )


def v1_batch(seed: int, has_draft: bool, vocab: int = 7) -> dict:
    generator = torch.Generator().manual_seed(seed)
    counts = [3, 0, 4, 1, 2, 0]
    number = sum(counts)
    law = (torch.randn(number, vocab, generator=generator) * 2).softmax(-1)
    tokens = torch.multinomial(law, 1, generator=generator).squeeze(1).int()
    target = torch.randn(number, vocab, generator=generator)
    target = target + 2 * torch.nn.functional.one_hot(tokens.long(), vocab)
    tokens[torch.rand(number, generator=generator) < 0.1] = -1
    temperature = torch.tensor([0.0, 0.0, 0.7, 1.0, 1.5, 1.0])
    return {
        "draft_token_ids": tokens,
        "num_draft_tokens": counts,
        "max_spec_len": 5,
        "cu_num_draft_tokens": torch.tensor(counts).cumsum(0).int(),
        "draft_probs": law if has_draft else None,
        "target_logits": target,
        "bonus_token_ids": torch.arange(100, 106).unsqueeze(1).int(),
        "sampling_metadata": metadata(
            temperature, generators={b: torch.Generator().manual_seed(1000 * seed + b) for b in range(6)}
        ),
    }
