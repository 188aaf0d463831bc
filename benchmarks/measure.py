"""What the benchmarks share: paired timing, measured memory bandwidth, cold buffers, environment, and the report."""

from __future__ import annotations

import argparse
import json
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from viasd.report.terminal import plain_table, progress_bar

RESULTS = Path(__file__).parent / "results"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of values of the order of 1, implementations may differ by the rounding of the dtype and of float32 sums.
TOLERANCES = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1.6e-2, 1e-2)}

COLUMNS = 4096  # of the matrix that measures the bandwidth

Way = Callable[[int], Any]


def arguments_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks of kernels have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=50, help="timed calls of each implementation and case")
    parser.add_argument("--buffer-mib", type=int, default=default_buffer_bytes() >> 20, help="size of cold buffers")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON")
    return parser


def last_level_cache_bytes() -> int:
    """As the system reports it; 0 where it does not."""
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    units = {"K": 1 << 10, "M": 1 << 20}
    return max((int(size[:-1]) * units[size[-1]] for size in sizes if size[-1:] in units), default=0)


def default_buffer_bytes() -> int:
    """1 GiB or twice the last-level cache, whichever is more, but at most an eighth of the memory that is free."""
    meminfo = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text()) if meminfo.exists() else None
    limit = int(found[1]) * 1024 // 8 if found else 1 << 30
    return min(max(1 << 30, 2 * last_level_cache_bytes()), limit)


def cold(tensor: torch.Tensor, total_bytes: int) -> Sequence[torch.Tensor]:
    """Copies of a tensor that fill ``total_bytes``: who goes round among them finds none in the cache."""
    count = max(2, -(-total_bytes // max(1, tensor.nbytes)))
    return tensor.expand(count, *tensor.shape).contiguous().unbind()


def interleaved(ways: Mapping[str, Way], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call; the ways take turns, in an order that rotates, so that drifts of the machine pair.

    A way is told a number that is new in every call: which of its cold buffers to use.
    """
    names, times, turn = list(ways), {name: [] for name in ways}, 0
    for repeat in range(-1, repeats):  # the first round is a warm-up
        first = repeat % len(names)
        for name in names[first:] + names[:first]:
            elapsed_ms = 1e3 * _seconds(lambda way=ways[name], number=turn: way(number))
            turn += 1
            if repeat >= 0:
                times[name].append(elapsed_ms)
    return times


def percentiles(times: Sequence[float]) -> dict[str, float]:
    values = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64))
    return dict(zip(("p20_ms", "p50_ms", "p80_ms"), values.tolist(), strict=True))


def paired_ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of one way's time divided by another's."""
    return statistics.median(a / b for a, b in zip(times, others, strict=True))


def implementations(call: Callable[[str], Any], expected: Callable[[], Any] | None = None, what: str = "") -> list[str]:
    """Which implementations there are here. Refuses to go on if one differs from the reference.

    ``expected`` makes the reference's result anew where the call writes to its arguments.
    """
    reference = (expected or (lambda: call("reference")))()
    try:
        refuse_unless_close(what, call("native"), reference)
    except NotImplementedError:
        return ["reference"]
    return ["native", "reference"]


def refuse_unless_close(what: str, got: Any, expected: Any) -> None:
    """End the benchmark if results differ: no figures of a wrong kernel."""
    for own, other in zip(_tensors(got), _tensors(expected), strict=True):
        rtol, atol = TOLERANCES.get(own.dtype, (0.0, 0.0))
        try:
            torch.testing.assert_close(own, other, rtol=rtol, atol=atol, equal_nan=True)
        except AssertionError as error:
            raise SystemExit(f"{what}: the result differs from the reference's, nothing is reported\n{error}") from None


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Bandwidth:
    """Memory bandwidth, sampled between the cases.

    Read: the faster of a dot product and a matrix-vector product (which of them uses all threads depends on the BLAS).
    Copy: torch's own; the bytes read and those written.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self._matrix = torch.ones(max(2, buffer_bytes // 4 // COLUMNS), COLUMNS)
        self._vector = torch.ones(COLUMNS)
        self._target = torch.empty_like(self._matrix)
        self.samples: dict[str, list[float]] = {"read": [], "copy": []}
        self.sample()  # pages are mapped by the first use
        for values in self.samples.values():
            values.clear()

    def sample(self) -> None:
        half = len(self._matrix) // 2
        heads, tails = self._matrix[:half].view(-1), self._matrix[half : 2 * half].view(-1)
        read_s = min(_seconds(lambda: torch.dot(heads, tails)), _seconds(lambda: self._matrix @ self._vector))
        self.samples["read"].append(self._matrix.nbytes / read_s)
        self.samples["copy"].append(2 * self._matrix.nbytes / _seconds(lambda: self._target.copy_(self._matrix)))

    def bytes_per_ms(self, kind: str) -> float:
        return statistics.median(self.samples[kind]) / 1e3

    def to_dict(self) -> dict[str, Any]:
        medians = {f"{kind}_gb_per_s": statistics.median(values) / 1e9 for kind, values in self.samples.items()}
        return {"buffer_bytes": self.buffer_bytes, "samples": len(self.samples["read"]), **medians}


class Report:
    """Measured cases: a table on the terminal, JSON in a file. Made once per benchmark."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.arguments = name, arguments
        self.buffer_bytes = arguments.buffer_mib << 20
        self.bandwidth = Bandwidth(self.buffer_bytes)
        self.rows: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}

    def measure(
        self, op: str, case: str, dtype: str, num_bytes: int, ways: Mapping[str, Way], kind: str = "read"
    ) -> None:
        """Time the ways of one case; ``num_bytes`` must move, and the bandwidth of this ``kind`` bounds it."""
        self.add(op, case, dtype, num_bytes, self.interleaved(f"{op}, {case}, {dtype}", ways), kind)

    def interleaved(self, what: str, ways: Mapping[str, Way]) -> dict[str, list[float]]:
        with progress_bar(Console(stderr=True)) as progress:
            progress(what, 0, 0)
            self.bandwidth.sample()
            return interleaved(ways, self.arguments.repeats)

    def add(
        self, op: str, case: str, dtype: str, num_bytes: int, times: Mapping[str, Sequence[float]], kind: str = "read"
    ) -> None:
        for way, own in times.items():
            entry = {"op": op, "case": case, "dtype": dtype, "way": way, **percentiles(own), "bytes": num_bytes}
            self.rows.append(entry | {"bandwidth": kind})

    def finish(self) -> None:
        """Fractions of the bandwidth's median over the whole run; table and file."""
        table = plain_table("operation", "case", "dtype", "way", "p20 ms", "p50 ms", "p80 ms", "MB", "of bandwidth")
        for row in self.rows:
            row["fraction"] = row["bytes"] / self.bandwidth.bytes_per_ms(row["bandwidth"]) / row["p50_ms"]
            cells = [f"{row[name]:.3f}" for name in ("p20_ms", "p50_ms", "p80_ms")]
            names = (row[name] for name in ("op", "case", "dtype", "way"))
            table.add_row(*names, *cells, f"{row['bytes'] / 1e6:.2f}", f"{row['fraction']:.0%} {row['bandwidth']}")
        settings = {name: value for name, value in vars(self.arguments).items() if name != "out"}
        # Folders of this machine are nobody else's business.
        settings = {name: value.name if isinstance(value, Path) else value for name, value in settings.items()}
        content = {"settings": settings, "environment": environment(), "bandwidth": self.bandwidth.to_dict()}
        self.arguments.out.mkdir(parents=True, exist_ok=True)
        file = self.arguments.out / f"{self.name}.json"
        text = json.dumps(content | self.more | {"rows": self.rows}, indent=1, default=str)
        file.write_text(text + "\n", encoding="utf-8")
        console = Console(width=None if Console().is_terminal else 140)
        console.print(table)
        measured = self.bandwidth.to_dict()
        console.print(
            f"read {measured['read_gb_per_s']:.1f} GB/s, copy {measured['copy_gb_per_s']:.1f} GB/s, "
            f"{torch.get_num_threads()} threads, buffers of {self.buffer_bytes >> 20} MiB beside a last-level cache of "
            f"{last_level_cache_bytes() >> 20} MiB",
            highlight=False,
        )


def environment() -> dict[str, Any]:
    """What the figures depend on beside the settings."""
    here = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "processor": names[0] if names else platform.processor(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
