"""The one JSON: what has been done and found, on disk after every part."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

FORMAT = "viasd-gpu-check-1"
FIGURES = ("_ms", "_per_s", "_bytes", "fraction", "_share", "times_floor", "speedup", "seconds")


class Record:
    """The file's content; only one process at a time holds it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.content: dict[str, Any] = {"format": FORMAT, "parts": {}}
        if file.exists():
            self.content = json.loads(file.read_text(encoding="utf-8"))

    @property
    def parts(self) -> dict[str, dict[str, Any]]:
        return self.content["parts"]

    @property
    def running(self) -> str | None:
        """The part that had begun when the file was last written."""
        return next((name for name, part in self.parts.items() if part["status"] == "running"), None)

    def set(self, name: str, status: str, **found: Any) -> None:
        self.parts[name] = {"status": status, **found}
        self.save()

    def save(self) -> None:
        """Replace the file in one go: a cut leaves the old one or the new one."""
        content = without_figures(self.content) if self.content.get("rehearsal") else self.content
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
        os.replace(partial, self.file)


def without_figures(value: Any) -> Any:
    """A rehearsal's times say nothing of anything, so nobody gets to see them."""
    if isinstance(value, dict):
        return {
            name: None if isinstance(own, float) and name.endswith(FIGURES) else without_figures(own)
            for name, own in value.items()
        }
    return [without_figures(own) for own in value] if isinstance(value, list) else value


class Attempts:
    """What was tried within one part and failed."""

    def __init__(self) -> None:
        self.failures: list[dict[str, str]] = []

    def attempt(self, what: str) -> Attempt:
        """A context: whatever is raised within is written down, and the next attempt follows."""
        return Attempt(what, self)

    def add(self, what: str, message: str, where: str = "") -> None:
        self.failures.append({"what": what, "message": message[:2000]} | ({"where": where} if where else {}))


class Attempt:
    """One attempt. A run has to tell all it can, and a kernel may fail in any way; benchmarks end with SystemExit."""

    def __init__(self, what: str, attempts: Attempts) -> None:
        self.what, self.attempts = what, attempts

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, (KeyboardInterrupt, GeneratorExit)):
            return False
        last = traceback.extract_tb(trace)[-1]
        self.attempts.add(self.what, f"{type(error).__name__}: {error}", f"{Path(last.filename).name}:{last.lineno}")
        return True


@dataclass(frozen=True)
class Part:
    """Something to do; what ``run`` returns is kept. Its step's name is the first half of its own."""

    name: str
    run: Callable[[Any], Any]

    @property
    def step(self) -> str:
        return self.name.partition("/")[0]


def run_part(part: Part, bench: Any, record: Record) -> None:
    """Run it; ``bench.attempts`` is where its attempts go, and ``bench.progress`` what is kept if it never ends."""
    started, bench.attempts = time.monotonic(), Attempts()

    def found() -> dict[str, Any]:
        own = {"seconds": time.monotonic() - started}
        return own | ({"failures": bench.attempts.failures} if bench.attempts.failures else {})

    bench.progress = lambda result: record.set(part.name, "running", result=result, **found())
    record.set(part.name, "running")
    with bench.attempts.attempt(part.name):
        result = part.run(bench)
        record.parts[part.name] = {"result": result}
    own = record.parts[part.name].get("result")
    status = "failed" if bench.attempts.failures else "passed"
    record.set(part.name, status, result=own, **found())
