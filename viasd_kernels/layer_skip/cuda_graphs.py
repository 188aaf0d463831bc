"""Passes captured in CUDA graphs, by what does not depend on data: shapes in buckets, the route, the pool's place."""

from collections import OrderedDict
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any, Callable, Optional, Tuple

import torch

from .kv_pool import KVSlots
from .structs import DecoderOutput, Step

MAX_GRAPHS = 128  # kept; the one that was not replayed for longest goes first
MIN_LENGTH = 256  # slots of a sequence: the smallest bucket


def bucket(size: int, smallest: int = 1) -> int:
    """The next power of two."""
    return max(smallest, 1 << (size - 1).bit_length())


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: "torch.cuda.CUDAGraph"
    step: Step  # in memory of its own, which the graph reads
    output: DecoderOutput  # which it writes


class PassGraphs:
    """Replays passes; captures those of a new kind. One pass at a time.

    Rows and sequences that fill a bucket belong to no sequence and have no rows: nothing they hold is read or written.
    """

    def __init__(self, run: Callable[[Step], DecoderOutput]) -> None:
        self._run = run
        self._captured: OrderedDict[Tuple[object, ...], _Captured] = OrderedDict()
        self._memory: Any = None  # of the first graph, which all share
        self._lock = Lock()

    def step(self, step: Step) -> DecoderOutput:
        with self._lock:
            padded = _padded_shapes(step)
            key = (*padded, step.kept, step.capture_layers, step.kv.pool.keys.data_ptr(), step.kv.pool.num_slots)
            captured = self._captured.pop(key, None)
            if captured is None:
                captured = self._capture(step, padded)
            self._captured[key] = captured
            if len(self._captured) > MAX_GRAPHS:
                self._captured.popitem(last=False)
            _fill(captured.step, step)
            captured.graph.replay()
            num_rows = step.tokens.shape[0]
            num_logits = num_rows if step.logits_rows is None else step.logits_rows.shape[0]
            hidden, logits, layers = captured.output
            return DecoderOutput(
                hidden[:num_rows].clone(),
                logits[:num_logits].clone(),
                {layer: stream[:num_rows].clone() for layer, stream in layers.items()},
            )

    def _capture(self, step: Step, padded: "Tuple[Optional[int], ...]") -> _Captured:
        own = _empty_like(step, padded)
        _fill(own, step)
        # Once outside of the graph: kernels are compiled and libraries set up. It writes what the replay writes again.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(own)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            output = self._run(own)
        self._memory = self._memory or graph.pool()
        return _Captured(graph, own, output)


def _padded_shapes(step: Step) -> "Tuple[Optional[int], ...]":
    """Rows, sequences, slots of a sequence and logits of the graph that serves the step; None for what it lacks."""
    return (
        bucket(step.tokens.shape[0]),
        bucket(step.kv.slots.shape[0]),
        bucket(step.kv.slots.shape[1], MIN_LENGTH),
        None if step.logits_rows is None else bucket(step.logits_rows.shape[0]),
        None if step.parents is None else 1,
        None if step.row_route is None else 1,
    )


def _empty_like(step: Step, padded: "Tuple[Optional[int], ...]") -> Step:
    rows, sequences, length, num_logits, *_ = padded

    def zeros(*shape: "Optional[int]", dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.zeros([size or 0 for size in shape], dtype=dtype, device=step.tokens.device)

    return replace(
        step,
        tokens=zeros(rows),
        positions=zeros(rows),
        row_start=zeros((sequences or 0) + 1),
        parents=None if step.parents is None else zeros(rows),
        kv=KVSlots(step.kv.pool, zeros(sequences, length), zeros(sequences)),
        row_route=None if step.row_route is None else zeros(rows, *step.row_route.shape[1:], dtype=torch.bool),
        logits_rows=None if num_logits is None else zeros(num_logits),
    )


def _fill(own: Step, step: Step) -> None:
    """Copy a step's tensors into the larger ones; sequences past its own have no rows."""
    num_rows, (num_sequences, length) = step.tokens.shape[0], step.kv.slots.shape
    own.tokens[:num_rows].copy_(step.tokens)
    own.positions[:num_rows].copy_(step.positions)
    own.row_start[: num_sequences + 1].copy_(step.row_start)
    own.row_start[num_sequences + 1 :].fill_(num_rows)
    own.kv.slots[:num_sequences, :length].copy_(step.kv.slots)
    own.kv.context_len[:num_sequences].copy_(step.kv.context_len)
    for mine, given in ((own.parents, step.parents), (own.row_route, step.row_route)):
        if mine is not None and given is not None:
            mine[:num_rows].copy_(given)
    if own.logits_rows is not None and step.logits_rows is not None:
        own.logits_rows[: step.logits_rows.shape[0]].copy_(step.logits_rows)
