"""Random configurations of decoders, for hypothesis."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from viasd_kernels.layer_skip import DecoderConfig, LayerConfig, RopeConfig

STABLE = settings(
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

RUNS_AND_TAILS = [5, 16, 33, 64, 97, 130]  # widths in and out of step with panels of 16 and runs of 64


@st.composite
def ropes(draw: st.DrawFn, head_dim: int) -> RopeConfig:
    return RopeConfig(
        theta=draw(st.sampled_from([100.0, 10_000.0])),
        kind=draw(st.sampled_from(["default", "linear", "llama3"])),
        rotary_dim=draw(st.sampled_from([None, 2, head_dim // 4 * 2 or 2])),
        factor=4.0,
        original_max_positions=64,
    )


@st.composite
def configs(draw: st.DrawFn) -> DecoderConfig:
    num_kv_heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([2, 6, 16, 20, 32, 72]))
    windows = st.sampled_from([None, 1, 5, 70])
    layer = st.builds(LayerConfig, window=windows, rope=ropes(head_dim))
    soft_cap = st.sampled_from([None, 1.5, 30.0])
    return DecoderConfig(
        vocab_size=draw(st.sampled_from([2, 16, 50, 135])),
        hidden_size=draw(st.sampled_from(RUNS_AND_TAILS)),
        intermediate_size=draw(st.sampled_from([1, *RUNS_AND_TAILS])),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 7])),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=tuple(draw(st.lists(layer, min_size=1, max_size=3))),
        norm_eps=draw(st.sampled_from([0.1, 0.5])),  # less, and norms of small vectors magnify any rounding
        norm_weight_offset=draw(st.sampled_from([0.0, 1.0])),
        activation=draw(st.sampled_from(["silu_mul", "gelu_tanh_mul"])),
        attention_scale=draw(st.sampled_from([None, 0.25])),
        attention_soft_cap=draw(soft_cap),
        logit_soft_cap=draw(soft_cap),
        embedding_scale=draw(st.sampled_from([1.0, 3.5])),
        qk_norm=draw(st.booleans()),
        post_norms=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        attention_out_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        tied_head=draw(st.booleans()),
    )
