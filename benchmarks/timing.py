"""How the benchmarks time: in turns, beside the measured memory bandwidth, on CPUs and on GPUs. Needs torch alone.

On a GPU a way is captured in a CUDA graph, many calls at a time, and replays are timed by events: what counts is the
device's time. What a call takes when Python launches it is told beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of values of the order of 1, implementations may differ by the rounding of the dtype and of float32 sums.
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1.6e-2, 1e-2)}
IMPLEMENTATIONS = ("triton", "native")

COLUMNS = 4096  # of the matrix that measures the bandwidth
MIN_CALLS, MAX_CALLS = 8, 256  # of one graph
LAUNCHES = 3  # rounds that time a call launched from Python

Way = Callable[[int], Any]


class Differs(SystemExit):
    """An implementation differs from the reference: no figures of a wrong kernel."""


def cold(tensor: torch.Tensor, total_bytes: int) -> Sequence[torch.Tensor]:
    """Copies of a tensor that fill ``total_bytes``: who goes round among them finds none in the cache."""
    count = max(2, -(-total_bytes // max(1, tensor.nbytes)))
    return tensor.expand(count, *tensor.shape).contiguous().unbind()


def elapsed_ms(call: Callable[[], Any], device: torch.device) -> float:
    """Wall time on a CPU; on a GPU the time between two events around what the call launches."""
    if device.type == "cpu":
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


CPU = torch.device("cpu")


def interleaved(ways: Mapping[str, Way], repeats: int, device: torch.device = CPU) -> dict[str, list[float]]:
    """Milliseconds of each call; the ways take turns, in an order that rotates, so that drifts of the machine pair.

    A way is told a number that is new in every call: which of its cold buffers to use.
    """
    names, times, turn = list(ways), {name: [] for name in ways}, 0
    for repeat in range(-1, repeats):  # the first round is a warm-up
        first = repeat % max(1, len(names))
        for name in names[first:] + names[:first]:
            own_ms = elapsed_ms(lambda way=ways[name], number=turn: way(number), device)
            turn += 1
            if repeat >= 0:
                times[name].append(own_ms)
    return times


class Replay:
    """So many calls of a way, captured in a CUDA graph; calling it replays them."""

    def __init__(self, way: Way, calls: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for turn in range(calls):  # kernels are compiled, libraries set up
                way(turn)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph, self.calls = torch.cuda.CUDAGraph(), calls
        with torch.cuda.graph(self.graph):
            for turn in range(calls):
                way(turn)

    def __call__(self, turn: int) -> None:
        self.graph.replay()


def launched_ms(way: Way, calls: int) -> float:
    """Wall time of a call that Python launches, one after the other, the device's work included."""
    times = []
    for _ in range(LAUNCHES):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for turn in range(calls):
            way(turn)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started) / calls)
    return statistics.median(times)


def percentiles(times: Sequence[float]) -> dict[str, float]:
    values = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    return dict(zip(("p20_ms", "p50_ms", "p80_ms"), values.tolist(), strict=True))


def paired_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of one way's time divided by another's."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def refuse_unless_close(what: str, got: Any, expected: Any) -> None:
    """Raise ``Differs`` if results differ."""
    for own, other in zip(_tensors(got), _tensors(expected), strict=True):
        rtol, atol = TOLERANCES.get(own.dtype, (0.0, 0.0))
        try:
            torch.testing.assert_close(own, other, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            message = f"{what}: the result differs from the reference's, nothing is reported\n{error}"
            raise Differs(message) from None


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


class Bandwidth:
    """A device's memory bandwidth, sampled between the cases.

    Read: on a CPU the faster of a dot product and a matrix-vector product (which of them uses all threads depends on
    the BLAS), on a GPU a sum. Copy: torch's own; the bytes read and those written.
    """

    def __init__(self, buffer_bytes: int, device: torch.device = CPU) -> None:
        self.buffer_bytes, self.device = buffer_bytes, device
        fill = torch.ones if device.type == "cpu" else torch.rand
        self._matrix = fill(max(2, buffer_bytes // 4 // COLUMNS), COLUMNS, device=device)
        self._vector = torch.ones(COLUMNS, device=device)
        self._target = torch.empty_like(self._matrix)
        self.samples: dict[str, list[float]] = {"read": [], "copy": []}
        self.sample()  # pages are mapped by the first use
        for values in self.samples.values():
            values.clear()

    def sample(self) -> None:
        half = len(self._matrix) // 2
        heads, tails = self._matrix[:half].view(-1), self._matrix[half : 2 * half].view(-1)
        reads: list[Callable[[], Any]] = [lambda: torch.dot(heads, tails), lambda: self._matrix @ self._vector]
        if self.device.type != "cpu":
            reads = [lambda: self._matrix.sum()]
        read_ms = min(elapsed_ms(read, self.device) for read in reads)
        copy_ms = elapsed_ms(lambda: self._target.copy_(self._matrix), self.device)
        self.samples["read"].append(1e3 * self._matrix.nbytes / read_ms)
        self.samples["copy"].append(2e3 * self._matrix.nbytes / copy_ms)

    def bytes_per_ms(self, kind: str) -> float:
        return statistics.median(self.samples[kind]) / 1e3

    def to_dict(self) -> dict[str, Any]:
        medians = {f"{kind}_gb_per_s": statistics.median(values) / 1e9 for kind, values in self.samples.items()}
        return {"buffer_bytes": self.buffer_bytes, "samples": len(self.samples["read"]), **medians}


class Cases:
    """Measured cases: what moves, and how long each way takes.

    Args:
        device: where tensors are made and ways run.
        buffer_bytes: size of cold buffers.
        repeats: timed rounds of a case.
        compiler: the backend with which torch.compile takes the plain expressions; None leaves it out.
        peers: whether other projects' kernels are timed beside ours.
        attempt: ``attempt(what)``, a context around each implementation and way; one that swallows what is raised lets
            the others go on.
    """

    def __init__(
        self,
        device: torch.device,
        buffer_bytes: int,
        repeats: int,
        *,
        compiler: str | None = None,
        peers: bool = False,
        attempt: Callable[[str], AbstractContextManager[Any]] = lambda what: nullcontext(),
    ) -> None:
        self.device, self.buffer_bytes, self.repeats = device, buffer_bytes, repeats
        self.compiler, self.peers, self.attempt = compiler, peers, attempt
        self.bandwidth = Bandwidth(buffer_bytes if device.type == "cpu" else max(buffer_bytes, 1 << 30), device)
        self.rows: list[dict[str, Any]] = []

    def implementations(
        self, call: Callable[[str], Any], expected: Callable[[], Any] | None = None, what: str = ""
    ) -> list[str]:
        """Which implementations there are here; one that differs from the reference is not among them, and raises.

        ``expected`` makes the reference's result anew where the call writes to its arguments. On a GPU the reference
        is the judge alone: it waits for the device, and its time would say nothing.
        """
        reference = (expected or (lambda: call("reference")))()
        found = []
        for impl in IMPLEMENTATIONS:
            with self.attempt(f"{what}, {impl}"):
                try:
                    refuse_unless_close(f"{what}, {impl}", call(impl), reference)
                except NotImplementedError:
                    continue
                found.append(impl)
        return found if self.device.type == "cuda" else [*found, "reference"]

    def torch_ways(self, expression: Callable[..., Any], arguments: Callable[[int], tuple[Any, ...]]) -> dict[str, Way]:
        """The plain expression, and torch.compile of it."""
        ways: dict[str, Way] = {"torch": lambda turn: expression(*arguments(turn))}
        if self.compiler:
            torch.compiler.reset()  # of one function only so many shapes are compiled
            compiled = torch.compile(expression, backend=self.compiler, dynamic=False)
            ways["torch.compile"] = lambda turn: compiled(*arguments(turn))
        return ways

    def measure(
        self, op: str, case: str, dtype: str, num_bytes: int, ways: Mapping[str, Way], kind: str = "read"
    ) -> None:
        """Time the ways of one case; ``num_bytes`` must move, and the bandwidth of this ``kind`` bounds it."""
        what = f"{op}, {case}, {dtype}"
        if self.device.type == "cpu":
            self.add(op, case, dtype, num_bytes, self.interleaved(what, ways), kind)
            return
        calls = min(max(self.buffer_bytes // max(num_bytes, 1), MIN_CALLS), MAX_CALLS)
        replays: dict[str, Way] = {}
        launched = {}
        for name, way in ways.items():
            with self.attempt(f"{what}, {name}"):
                replay = Replay(way, calls)
                launched[name] = launched_ms(way, min(calls, 64))
                replays[name] = replay
        times = {name: [ms / calls for ms in own] for name, own in self.interleaved(what, replays).items()}
        self.add(op, case, dtype, num_bytes, times, "copy")
        for row in self.rows[len(self.rows) - len(times) :]:
            row["launched_ms"] = launched[row["way"]]

    def interleaved(self, what: str, ways: Mapping[str, Way]) -> dict[str, list[float]]:
        """Time the ways; ``what`` is said to who watches."""
        self.bandwidth.sample()
        return interleaved(ways, self.repeats, self.device)

    def add(
        self, op: str, case: str, dtype: str, num_bytes: int, times: Mapping[str, Sequence[float]], kind: str = "read"
    ) -> None:
        for way, own in times.items():
            entry = {"op": op, "case": case, "dtype": dtype, "way": way, **percentiles(own), "bytes": num_bytes}
            self.rows.append(entry | {"bandwidth": kind})

    def add_fractions(self) -> None:
        """Fractions of the bandwidth's median over the whole run."""
        for row in self.rows:
            row["fraction"] = row["bytes"] / self.bandwidth.bytes_per_ms(row["bandwidth"]) / row["p50_ms"]
