"""What the benchmarks of kernels share beside timing: options, the report with its table, the environment."""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from timing import DTYPES, Cases, Way

RESULTS = Path(__file__).parent / "results"


def arguments_parser(description: str | None) -> argparse.ArgumentParser:
    """The options that all benchmarks of kernels have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=50, help="timed calls of each implementation and case")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
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


class Report(Cases):
    """Measured cases: a table on the terminal, JSON in a file. Made once per benchmark."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        device = torch.device(arguments.device)
        compiler = "inductor" if device.type == "cuda" else None
        super().__init__(device, arguments.buffer_mib << 20, arguments.repeats, compiler=compiler, peers=True)
        self.name = name if device.type == "cpu" else f"{name}_{device.type}"
        self.arguments = arguments
        self.more: dict[str, Any] = {}

    def interleaved(self, what: str, ways: Mapping[str, Way]) -> dict[str, list[float]]:
        from rich.console import Console  # here, as gpu_check.py goes without

        from viasd.report.terminal import progress_bar

        with progress_bar(Console(stderr=True)) as progress:
            progress(what, 0, 0)
            return super().interleaved(what, ways)

    def finish(self) -> None:
        """Fractions of the bandwidth; table and file."""
        from rich.console import Console

        from viasd.report.terminal import plain_table

        self.add_fractions()
        table = plain_table("operation", "case", "dtype", "way", "p20 ms", "p50 ms", "p80 ms", "MB", "of bandwidth")
        for row in self.rows:
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
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": command_output("git", "rev-parse", "HEAD"),
        "processor": names[0] if names else platform.processor(),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(0)
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found |= {
            "gpu": device.name,
            "gpu_bytes": device.total_memory,
            "gpu_processors": device.multi_processor_count,
            "gpu_cache_bytes": device.L2_cache_size,
            "driver": command_output(*query),
            "cuda": torch.version.cuda,
        }
    return found


def command_output(*command: str) -> str:
    """What a command prints; nothing where there is no such command."""
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
