"""SGLang's and vLLM's signatures over the Triton ops in the interpreter, against the reference."""

import pytest
import torch
from compat_cases import linked, outputs, random_parents, v1_batch, v2_batch
from on_device import INTERPRETED

from viasd_kernels.compat.sglang import (
    TreeMaskMode,
    build_tree_kernel_efficient,
    tree_speculative_sampling_target_only,
    verify_tree_greedy,
)
from viasd_kernels.compat.vllm import rejection_sample, rejection_sample_v1

pytestmark = [
    pytest.mark.skipif(not INTERPRETED, reason="on CPU tensors"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, about infinities that are meant
]


def by_both(call):
    """What call(impl) yields must be the same tensors."""
    for got, expected in zip(call("triton"), call("reference"), strict=True):
        assert torch.equal(got, expected)


def test_sglang_verification():
    batch, nodes, vocab, steps = 4, 9, 5, 4
    generator = torch.Generator().manual_seed(0)
    tokens, argmax = torch.randint(0, vocab, (2, batch, nodes), generator=generator)
    coins, probs = (
        torch.rand(batch, nodes + 1, generator=generator),
        torch.rand(batch, nodes, vocab, generator=generator),
    )
    tree = linked(random_parents(1, batch, nodes))

    def greedy(impl):
        got = outputs(batch, nodes, steps)
        verify_tree_greedy(*got, tokens, *tree, argmax, impl=impl)
        return got

    def sampled(impl):
        got = outputs(batch, nodes, steps)
        rest = (coins[:, :nodes], coins[:, nodes].contiguous(), probs, torch.zeros_like(probs))
        tree_speculative_sampling_target_only(*got, tokens, *tree, *rest, impl=impl)
        return got

    by_both(greedy)
    by_both(sampled)


def test_sglang_tree():
    parent_list, selected = torch.tensor([[-1, 0, 1]] * 2), torch.tensor([[0, 1, 2, 5], [0, 1, 3, 4]])

    def build(impl):
        out = torch.zeros(50, dtype=torch.bool), torch.zeros(10).long(), *torch.full((3, 2, 5), -1)
        arguments = (parent_list, selected, torch.tensor([4, 7]), *out, 2, 2, 5, TreeMaskMode.QLEN_ONLY)
        build_tree_kernel_efficient(*arguments, impl=impl)
        return out

    by_both(build)


@pytest.mark.parametrize("has_draft", [False, True])
def test_vllm(has_draft):
    by_both(lambda impl: rejection_sample(**v2_batch(2, has_draft), impl=impl))
    by_both(lambda impl: [rejection_sample_v1(**v1_batch(2, has_draft), impl=impl)])
