"""The whole decode step: packed rows in, logits out, with layers bypassed on request."""

from typing import Mapping, Optional, Protocol, Sequence, Tuple

import torch

from ..checks import INDEX_DTYPES, check_row_start, check_tensor, resolve_impl
from ..tree_verify import build_tree
from . import reference
from .config import DecoderConfig
from .kv_pool import KVPool, KVSlots
from .op import available
from .structs import DecoderOutput, RowPlaces, Step
from .weights import check_names, take_weight, weight_shapes

OP = "SkipDecoder"


class Decoder(Protocol):
    """An implementation: weights in its own form, and one pass over them."""

    weight_bytes: int

    def step(self, step: Step) -> DecoderOutput:
        """Run one pass whose arguments have been checked."""


class SkipDecoder:
    """A decoder-only language model that runs any subset of its sub-layers over keys and values in token slots.

    Per layer, with n the layer's norms and attention over what a row sees::

        x <- x + post(attention_out(attend(qkv(n(x)))))          where the row keeps the layer's attention
        x <- x + post(mlp_out(activation(gate_up(n(x)))))        where the row keeps the layer's MLP

    and logits = cap(head(n(x))). It holds weights and no state of any run: threads may share it, each with its own
    pool. The reference uses the weights as they are, without a copy; native packs them into memory of its own and
    reads each name of the mapping once, so that a mapping may make them as they are asked for.

    Args:
        weights: tensors by name, as ``weight_shapes(config)`` lists them; one dtype (float32, float16, bfloat16 or
            float64) and device.
        config: the architecture.
        impl: "auto", "reference", "triton" or "native"; only "auto" falls back.
        compact: whether native may store a matrix in fewer bytes where that keeps every weight exactly: weights that
            were quantised once, or rounded to bfloat16, and widened since. Results are the same, bit for bit.
        graphs: whether triton captures passes of up to 64 rows in CUDA graphs, by their shapes and route, and replays
            them; passes then run one at a time.

    Attributes:
        config: as given.
        implementation: the one that runs.
        device, dtype: of the weights.
        weight_bytes: what the matrices take in memory.

    Raises:
        TypeError, ValueError: a weight missing, unknown, or of the wrong shape, dtype or device.
        NotImplementedError: ``impl``.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        config: DecoderConfig,
        *,
        impl: str = "auto",
        compact: bool = True,
        graphs: bool = True,
    ) -> None:
        check_names(weights, config)
        embedding = take_weight(weights, "embedding", weight_shapes(config))
        self.config, self.device, self.dtype = config, embedding.device, embedding.dtype
        self.implementation = resolve_impl(OP, impl, self.device, self.available(self.device, self.dtype))
        if self.implementation == "native":
            from .native import NativeDecoder

            self._decoder: Decoder = NativeDecoder(weights, config, embedding, compact=compact)
        elif self.implementation == "triton":
            from .triton_decoder import TritonDecoder

            self._decoder = TritonDecoder(weights, config, graphs=graphs)
        else:
            self._decoder = reference.ReferenceDecoder(weights, config)

    @property
    def weight_bytes(self) -> int:
        return self._decoder.weight_bytes

    @staticmethod
    def available(device: torch.device, dtype: torch.dtype) -> Tuple[str, ...]:
        """The implementations that there are for weights on this device, of this dtype."""
        return available(device, dtype)

    def new_pool(self, num_slots: int) -> KVPool:
        """An empty pool of the right shape, dtype and device."""
        return KVPool(self.config, num_slots, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        row_start: torch.Tensor,
        kv: KVSlots,
        *,
        parents: Optional[torch.Tensor] = None,
        route: Optional[Sequence[Tuple[bool, bool]]] = None,
        row_route: Optional[torch.Tensor] = None,
        logits_rows: Optional[torch.Tensor] = None,
        capture_layers: Sequence[int] = (),
        check: bool = True,
    ) -> DecoderOutput:
        """Run one pass over R rows of B sequences.

        A row sees its sequence's context, its ancestors and itself. In every layer whose attention it keeps, its keys
        and values go to its slot; in the others the slot stays as it was. So a row may keep an attention only where
        its parent does, and where the rows of its context did in the pass that wrote them.

        Args:
            tokens: [R] int32 or int64 ids. -1: an unused row; it enters as zeros, and what it yields means nothing.
            positions: [R] int32 or int64 absolute positions, for the rotary embedding. Windows count positions as
                ``tree_attention`` does: a row is at context_len + depth.
            row_start: [B+1] int32 or int64: sequence b has the rows row_start[b] to row_start[b+1].
            kv: where context and rows lie; the pool has the decoder's shape, dtype and device, and is written to.
            parents: [R] int32 or int64, as for ``build_tree``; None: chains.
            route: [L] pairs (keep attention, keep MLP) for all rows: sub-layers that are not kept are not run. None:
                all are kept.
            row_route: [R, L, 2] bool: the same for each row, in place of ``route``. A sub-layer that no row keeps is
                not run.
            logits_rows: [n] int32 or int64, the rows whose logits are wanted; None: all.
            capture_layers: numbers in [0, L].
            check: whether to raise for wrong values in tensors (synchronises).

        Returns:
            DecoderOutput: ``hidden`` [R, D] after the final norm, ``logits`` [n, V] before temperature, and
            ``captured``: for i in ``capture_layers`` the residual stream [R, D] that enters layer i (for L: that leaves
            the last layer), in which a bypassed row is bit-identical from layer to layer. Dtype of the weights.
            Captured tensors may share memory.

        Raises:
            TypeError, ValueError: an argument of the wrong dtype, shape, device or value; with ``check`` also tokens,
                slots, positions or links out of range, two rows in one slot, a row in a slot of some context, a row
                that keeps an attention which its parent bypasses.

        Numerics: every sum in float32 (float64 for float64 weights), rounded to the weights' dtype after each op;
        angles of the rotary embedding in float32. Not differentiable.
        """
        kept = self._kept(route, row_route)
        self._check_arguments(tokens, positions, row_start, kv, parents, row_route, logits_rows)
        captured = _check_layers(capture_layers, self.config.num_layers)
        if check:
            check_row_start(OP, row_start, tokens.shape[0])
            _check_range("tokens", tokens, -1, self.config.vocab_size)
            _check_range("positions", positions, 0, None)
            _check_slots(kv, row_start)
            if logits_rows is not None:
                _check_range("logits_rows", logits_rows, 0, tokens.shape[0])
            _check_places(RowPlaces.of(tokens.shape[0], row_start, kv, parents), row_start, kv, row_route)
        return self._decoder.step(
            Step(tokens, positions, row_start, parents, kv, kept, row_route, logits_rows, captured)
        )

    def _kept(
        self, route: Optional[Sequence[Tuple[bool, bool]]], row_route: Optional[torch.Tensor]
    ) -> Tuple[Tuple[bool, bool], ...]:
        """[L][2]: which sub-layers any row keeps."""
        num_layers = self.config.num_layers
        if row_route is not None:
            if route is not None:
                raise ValueError(f"{OP}: route must be None where row_route is given")
            check_tensor(OP, "row_route", row_route, [None, num_layers, 2], [torch.bool], self.device)
            if self.device.type != "cpu":  # not worth a wait for the device: tiles without a row to keep end at once
                return ((True, True),) * num_layers
            return tuple((attention, mlp) for attention, mlp in row_route.any(0).tolist())
        if route is None:
            return ((True, True),) * num_layers
        if len(route) != num_layers or any(len(pair) != 2 for pair in route):
            raise ValueError(f"{OP}: route must have a pair for each of {num_layers} layers, got {route!r}")
        return tuple((bool(attention), bool(mlp)) for attention, mlp in route)

    def _check_arguments(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        row_start: torch.Tensor,
        kv: KVSlots,
        parents: Optional[torch.Tensor],
        row_route: Optional[torch.Tensor],
        logits_rows: Optional[torch.Tensor],
    ) -> None:
        device, config = self.device, self.config
        check_tensor(OP, "tokens", tokens, [None], INDEX_DTYPES, device)
        num_rows = tokens.shape[0]
        check_tensor(OP, "positions", positions, [num_rows], INDEX_DTYPES, device)
        check_tensor(OP, "kv.slots", kv.slots, [None, None], INDEX_DTYPES, device)
        check_tensor(OP, "kv.context_len", kv.context_len, [kv.slots.shape[0]], INDEX_DTYPES, device)
        check_tensor(OP, "row_start", row_start, [kv.slots.shape[0] + 1], INDEX_DTYPES, device)
        pool_shape = [config.num_layers, None, config.num_kv_heads, config.head_dim]
        check_tensor(OP, "kv.pool.keys", kv.pool.keys, pool_shape, [self.dtype], device)
        check_tensor(OP, "kv.pool.values", kv.pool.values, list(kv.pool.keys.shape), [self.dtype], device)
        if parents is not None:
            check_tensor(OP, "parents", parents, [num_rows], INDEX_DTYPES, device)
        if row_route is not None:
            check_tensor(OP, "row_route", row_route, [num_rows, config.num_layers, 2], [torch.bool], device)
        if logits_rows is not None:
            check_tensor(OP, "logits_rows", logits_rows, [None], INDEX_DTYPES, device)


def _check_layers(capture_layers: Sequence[int], num_layers: int) -> Tuple[int, ...]:
    for layer in capture_layers:
        if not 0 <= layer <= num_layers:
            raise ValueError(f"{OP}: capture_layers must be in [0, {num_layers}], got {layer}")
    return tuple(capture_layers)


def _check_range(name: str, values: torch.Tensor, low: int, end: Optional[int]) -> None:
    outside = values < low if end is None else (values < low) | (values >= end)
    wrong = values[outside]
    if wrong.numel():
        expected = f">= {low}" if end is None else f"in [{low}, {end})"
        raise ValueError(f"{OP}: {name} must be {expected}, got {int(wrong[0])}")


def _check_slots(kv: KVSlots, row_start: torch.Tensor) -> None:
    lengths = kv.context_len + row_start.diff()
    if bool((kv.context_len < 0).any()) or bool((lengths > kv.slots.shape[1]).any()):
        raise ValueError(
            f"{OP}: kv.context_len must be >= 0 and, with the sequence's rows, at most max_len = {kv.slots.shape[1]}; "
            f"got {kv.context_len.tolist()} with {row_start.diff().tolist()} rows"
        )
    used = torch.arange(kv.slots.shape[1], device=kv.slots.device) < lengths.unsqueeze(1)
    _check_range("kv.slots", kv.slots[used], 0, kv.pool.num_slots)


def _check_places(places: RowPlaces, row_start: torch.Tensor, kv: KVSlots, row_route: Optional[torch.Tensor]) -> None:
    longest = max(int(row_start.diff().max()), 1) if row_start.shape[0] > 1 else 1
    build_tree(places.parents, row_start, max_rows=longest)  # raises for links that make no tree
    if places.slots.unique().numel() < places.slots.numel():
        raise ValueError(f"{OP}: kv.slots must give every row a slot of its own, got {places.slots.tolist()}")
    in_context = torch.arange(kv.slots.shape[1], device=kv.slots.device) < kv.context_len.unsqueeze(1)
    taken = places.slots[torch.isin(places.slots, kv.slots[in_context].long())]
    if taken.numel():
        raise ValueError(f"{OP}: kv.slots must not put a row into a slot of some context, got {int(taken[0])}")
    if row_route is not None:
        _check_parents_keep(row_route[:, :, 0], row_start[places.sequence] + places.parents, places.local > 0)


def _check_parents_keep(keep_attention: torch.Tensor, parent_rows: torch.Tensor, has_parent: torch.Tensor) -> None:
    """A row that keeps an attention sees its parent's keys there, which its parent must have written."""
    blind = (keep_attention[has_parent] & ~keep_attention[parent_rows[has_parent]]).nonzero()
    if blind.numel():
        row, layer = int(has_parent.nonzero()[int(blind[0, 0])]), int(blind[0, 1])
        raise ValueError(f"{OP}: row_route must keep layer {layer}'s attention in the parent of row {row} too")
