"""Compile each public function as the first thing that a process does with the package, and call it.

    python first_calls.py BACKEND

The processes are forks of this one, which has imported torch's compiler and nothing of viasd_kernels. Prints a line per
function: its name, and "same" where the compiled call yields what a plain one does.
"""

import os
import sys
import traceback

import torch
import torch._dynamo
import torch._inductor.compile_fx

ROW_START = torch.tensor([0, 3, 5])
COINS = torch.linspace(0.05, 0.9, 5, dtype=torch.float64)
LOGITS, OTHER = torch.arange(35.0).view(5, 7).sin(), torch.arange(35.0).view(5, 7).cos()
TOKENS, PARENTS = torch.tensor([0, 6, 2, 3, 4]), torch.tensor([-1, 0, 0, -1, 0])
HEAT, HEATS = torch.tensor([0.0, 1.0]), torch.ones(5)
KEEP = torch.tensor([True, False, True, True, False])
CHAIN = (TOKENS, LOGITS, COINS, ROW_START)
LINKS = torch.tensor([[0, 1, 1, 0, 1], [1, -1, -1, 1, -1], [-1, 2, -1, -1, -1]], dtype=torch.int32).unbind()
QUERIES, KEYS, VALUES = torch.arange(40.0).view(5, 2, 4), torch.arange(48.0).view(6, 2, 4).sin(), torch.ones(6, 2, 4)
SLOTS, CONTEXT, ANCESTORS = torch.arange(6).view(2, 3), torch.tensor([0, 1]), torch.tensor([[0], [1], [1], [0], [1]])
CACHES = torch.arange(48.0).view(2, 6, 2, 2), torch.arange(48.0).view(2, 6, 2, 2) + 7
NODES = torch.tensor([[[0, 5, 6, 2]], [[0, 1, 2, 3]], [[1, 3, -1, -1]], [[-1, 2, -1, -1]]]).unbind()
NODE_COINS, NODE_PROBS = (torch.full((1, 4), 0.4), torch.ones(1)), (torch.full((1, 4, 7), 1 / 7), torch.zeros(1, 4, 7))
SELECTED = torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 3]]), torch.tensor([6])
STATES, DRAFTS = torch.arange(2), torch.arange(28.0).view(2, 2, 7).sin()
PATH, ACCEPTED, STARTS = torch.tensor([0, 2, -1, 0, 1]), torch.tensor([1, 1]), torch.tensor([2, 4])


def uniforms(kernels):
    return kernels.uniforms(TOKENS, TOKENS, 4)


def draw_from_weights(kernels):
    return kernels.draw_from_weights(LOGITS.abs(), COINS)


def acceptance_stats(kernels):
    return kernels.acceptance_stats(OTHER, LOGITS, TOKENS, temperature=HEATS, check=False)


def accept_chain(kernels):
    return kernels.accept_chain(*CHAIN, temperature=HEAT, draft_logits=OTHER, check=False)


def gate_tiers(kernels):
    return kernels.gate_tiers(*CHAIN, gate=kernels.gate, temperature=HEAT, draft_logits=OTHER, check=False)


def build_tree(kernels):
    return kernels.build_tree(PARENTS, ROW_START, max_rows=3, check=False)


def verify_tree(kernels):
    return kernels.verify_tree(kernels.Tree(ANCESTORS, *LINKS), *CHAIN, temperature=HEAT, check=False)


def tree_attention(kernels):
    places = (SLOTS, CONTEXT, ROW_START, ANCESTORS)
    return kernels.tree_attention(QUERIES, KEYS, VALUES, *places, scale=0.5, check=False)


def compact_kv(kernels):
    k, v = (cache.clone() for cache in CACHES)
    kernels.compact_kv(k, v, PATH, ACCEPTED, ROW_START, STARTS, check=False)
    return k, v


def bypass_norm(kernels):
    return kernels.bypass_norm(LOGITS, OTHER, KEEP, OTHER[0], eps=1e-6)


def bypass_linear(kernels):
    return kernels.bypass_linear(LOGITS, OTHER[:4], KEEP, residual=OTHER[:, :4])


def out():
    """SGLang's outputs for one request of four nodes: predicts, accept_index, accept_token_num."""
    return torch.zeros(4).int(), torch.full((1, 3), -1).int(), torch.zeros(1).int()


def build_tree_kernel_efficient(kernels):
    filled = torch.zeros(16).bool(), torch.zeros(4).long(), *torch.full((3, 1, 4), -1)
    kernels.compat.sglang.build_tree_kernel_efficient(*SELECTED, *filled, 2, 2, 4, 1)
    return filled


def verify_tree_greedy(kernels):
    filled = out()
    kernels.compat.sglang.verify_tree_greedy(*filled, *NODES, NODES[0])
    return filled


def tree_speculative_sampling_target_only(kernels):
    filled = out()
    kernels.compat.sglang.tree_speculative_sampling_target_only(*filled, *NODES, *NODE_COINS, *NODE_PROBS)
    return filled


def rejection_sample(kernels):
    requests = (ROW_START, TOKENS, STATES, TOKENS, TOKENS)
    return kernels.compat.vllm.rejection_sample(LOGITS, DRAFTS, TOKENS, *requests, HEAT, STATES, 2)


FUNCTIONS = [uniforms, draw_from_weights, acceptance_stats, accept_chain, gate_tiers, build_tree, verify_tree]
FUNCTIONS += [tree_attention, compact_kv, bypass_norm, bypass_linear]
OF_ENGINES = [build_tree_kernel_efficient, verify_tree_greedy, tree_speculative_sampling_target_only, rejection_sample]


def same_as_plain(function, backend):
    import viasd_kernels as kernels
    import viasd_kernels.compat.sglang
    import viasd_kernels.compat.vllm

    if function is gate_tiers:  # built once per batch, outside the graph
        kernels.gate = kernels.Gate("tv", torch.full((2,), 0.2), torch.full((2,), 0.6))
    compiled = torch.compile(lambda: function(kernels), backend=backend, fullgraph=True)()
    torch.testing.assert_close(compiled, function(kernels), rtol=0, atol=0, equal_nan=True)
    print(function.__name__, "same", flush=True)


def in_a_fork(function, backend):
    """Whether it ended well."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] == 0
    status = 1
    try:
        same_as_plain(function, backend)
        status = 0
    finally:
        if status:
            traceback.print_exc()
        os._exit(status)


if __name__ == "__main__":
    assert not any(name.startswith("viasd_kernels") for name in sys.modules)
    ended_well = [in_a_fork(function, sys.argv[1]) for function in FUNCTIONS + OF_ENGINES]
    sys.exit(not all(ended_well))
