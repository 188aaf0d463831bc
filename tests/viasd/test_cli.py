"""The command line: what it prints, to whom, and how it fails."""

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import viasd
from viasd import cli
from viasd.decode import Result, Stats, Token
from viasd.report import demo as demo_report
from viasd.report import info as info_report

TOKENS = [Token(5, "Tides ", "draft"), Token(6, "come and ", "slim"), Token(7, "go.", "full")]
ANSI = re.compile(r"\x1b\[")


class StubStream(Iterator[Token]):
    """Three tokens, then the end or an exception; `result` is what was given so far."""

    def __init__(self, broken_off: BaseException | None) -> None:
        self.broken_off = broken_off
        self.result = Result([1, 2], stats=Stats(num_full_passes=2, num_slim_passes=1, decode_ms=30.0))

    def __next__(self) -> Token:
        given = len(self.result.tokens)
        if given == 2 and self.broken_off is not None:
            raise self.broken_off
        if given == len(TOKENS):
            self.result.finish_reason = "length"
            raise StopIteration
        token = TOKENS[given]
        self.result.tokens.append(token.id)
        self.result.tiers.append(token.tier)
        self.result.text += token.text
        self.result.stats.num_tokens += 1
        return token


class StubModel:
    """Stands in for a loaded LanguageModel and remembers what it was asked."""

    name = "stub"
    model = SimpleNamespace(
        num_layers=4,
        vocab_size=8,
        max_positions=64,
        device=torch.device("cpu"),
        implementation="stub",
        reason="for tests",
    )
    speculation = viasd.Speculation()
    eos_token_ids = ()

    def __init__(self) -> None:
        self.tokenizer: Any = SimpleNamespace(chat_template="{{ messages }}")
        self.drafter: Any = SimpleNamespace(name="prompt-lookup")
        self.route: viasd.Route | None = None
        self.load_arguments: dict[str, Any] = {}
        self.prompt: Any = None
        self.settings: dict[str, Any] = {}
        self.broken_off: BaseException | None = None

    def load(self, model: str | None, **arguments: Any) -> "StubModel":
        self.load_arguments = {"model": model, **arguments}
        if arguments.get("drafter") == "nonsense":
            raise viasd.InvalidInput("drafter must be 'prompt-lookup' or 'self', got 'nonsense'")
        return self

    def stream(self, prompt: Any, **settings: Any) -> StubStream:
        self.prompt, self.settings = prompt, settings
        return StubStream(self.broken_off)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> StubModel:
    stub = StubModel()
    monkeypatch.setattr(viasd, "load", stub.load)
    return stub


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs the command line; returns exit code, stdout and stderr."""

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_generate_prints_plain_text_when_piped(stub: StubModel, run: Run) -> None:
    assert run("generate", "What is a tide?") == (0, "Tides come and go.\n", "")
    assert stub.prompt == [{"role": "user", "content": "What is a tide?"}]


def test_generate_takes_the_prompt_from_file_and_stdin(stub: StubModel, run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n", encoding="utf-8")
    assert run("generate", "--raw", "--file", str(file))[0] == 0
    assert stub.prompt == "from a file"
    assert run("generate", "--raw", stdin="from a pipe\n\n")[0] == 0
    assert stub.prompt == "from a pipe\n", "only the last line break is dropped"


def test_generate_continues_raw_text_without_chat_template(stub: StubModel, run: Run) -> None:
    stub.tokenizer = SimpleNamespace(chat_template=None)
    assert run("generate", "Once")[0] == 0
    assert stub.prompt == "Once"


def test_generate_passes_every_option_on(stub: StubModel, run: Run) -> None:
    options = "--model m --drafter self --route default --max-new-tokens 3 --temperature 0.5 --top-k 4 --top-p 0.9"
    more = "--min-p 0.1 --seed 7 --gamma 2 --max-pending 3 --mode tiered --gate kl --repetition-penalty 1.5"
    more += " --frequency-penalty 0.5 --presence-penalty -1 --min-new-tokens 2 --stop x --stop yz --logprobs 3"
    assert run("generate", "x", *options.split(), *more.split())[0] == 0
    arguments = stub.load_arguments
    assert (arguments["model"], arguments["drafter"], arguments["route"]) == ("m", "self", "default")
    assert arguments["speculation"] == viasd.Speculation("tiered", gamma=2, max_pending=3, gate=viasd.Gate("kl"))
    expected = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 7}
    expected |= {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": -1.0, "min_new_tokens": 2}
    expected |= {"stop": ["x", "yz"], "logprobs": 3}
    assert stub.settings == expected
    assert run("generate", "x", "--drafter", "none")[0] == 0
    assert stub.load_arguments["drafter"] is None


def test_generate_json_is_one_object(stub: StubModel, run: Run) -> None:
    code, out, _ = run("generate", "x", "--json")
    content = json.loads(out)
    assert code == 0
    assert content["tokens"] == [5, 6, 7]
    assert content["text"] == "Tides come and go."
    assert content["tiers"] == ["draft", "slim", "full"]
    assert content["finish_reason"] == "length"
    assert content["stats"]["tokens_per_full_pass"] == 1.5


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_interruption_prints_what_there_is(stub: StubModel, run: Run, as_json: bool) -> None:
    stub.broken_off = KeyboardInterrupt()
    code, out, err = run("generate", "x", *(["--json"] if as_json else []))
    assert code == 130
    assert err == ""
    assert (json.loads(out)["text"] + "\n" if as_json else out) == "Tides come and \n"


def test_broken_generation_prints_what_there_is_and_why(stub: StubModel, run: Run) -> None:
    stub.broken_off = viasd.DecodeError("the logits hold NaN", [])
    assert run("generate", "x") == (2, "Tides come and \n", "error: the logits hold NaN\n")


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["generate", ""], "PROMPT"),
        (["generate"], "stdin"),
        (["generate", "x", "--file", "y"], "--file"),
        (["generate", "--file", "/no/such/file"], "--file"),
        (["generate", "x", "--drafter", "nonsense"], "drafter"),
        (["generate", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "x", "--max-new-tokens", "-3"], "--max-new-tokens"),
        (["generate", "x", "--gamma", "0"], "--gamma"),
        (["generate", "x", "--max-pending", "many"], "--max-pending"),
        (["generate", "x", "--temperature", "-1"], "--temperature"),
        (["generate", "x", "--top-p", "1.5"], "--top-p"),
        (["generate", "x", "--top-k", "-1"], "--top-k"),
        (["generate", "x", "--min-p", "2"], "--min-p"),
        (["generate", "x", "--mode", "fast", "--route", "default"], "mode must be"),
        (["generate", "x", "--mode", "tiered"], "--mode tiered needs"),
        (["generate", "x", "--gate", "js"], "criterion must be"),
        (["generate", "x", "--nonsense"], "--nonsense"),
        (["nonsense"], "nonsense"),
        (["demo", "--max-new-tokens", "0"], "--max-new-tokens"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_that_names_it(stub: StubModel, run: Run, arguments: list[str], names: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert names in err


def test_help_and_version(run: Run) -> None:
    for arguments in ([], ["--help"], ["demo", "--help"], ["generate", "--help"], ["info", "--help"]):
        code, out, err = run(*arguments)
        assert (code, err) == (0, "")
        assert "Usage: viasd" in out
    assert run("--version") == (0, f"viasd {version('viasd')}\n", "")


def test_missing_library_names_the_line_that_installs_it() -> None:
    blocked = "import sys; sys.modules['typer'] = None; import viasd.cli"
    done = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "error: the command line needs typer; this installs it:",
        "pip install 'viasd[cli]'",
    ]


def test_tiers_are_coloured_on_a_terminal_only(stub: StubModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    coloured, plain = (in_terminal(["generate", "x", tiers], monkeypatch) for tiers in ("--tiers", "--no-tiers"))
    assert ANSI.search(coloured)
    assert not ANSI.search(plain)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain == "Tides come and go.\r\n"


def in_terminal(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """What the command line writes to stdout when that is a terminal."""
    reader, writer = pty.openpty()
    with open(writer, "w", encoding="utf-8") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        with pytest.raises(SystemExit):
            cli.main(arguments)
    # One read may come before all of it went through the terminal; the end shows as an error on Linux.
    output = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(reader, 65536):
            output += chunk
    os.close(reader)
    return output.decode()


def test_info_without_the_model_prints_the_install_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info_report, "embedded_state", lambda: "not installed; this installs it:\npip install it")
    code, out, err = run("info")
    assert (code, err) == (0, "")
    assert "pip install it" in out
    assert "accept_chain" in out


def test_info_describes_the_model(stub: StubModel, run: Run) -> None:
    stub.route = viasd.Route((True, False, True, True), (True, False, False, True))
    code, out, _ = run("info", "--model", "stub")
    assert code == 0
    assert "bypasses attention in 1 and MLP in 2 of 4 layers" in " ".join(out.split())
    assert not ANSI.search(out)


def measurement(tokens_per_second: float, num_full_passes: int, tokens: list[int]) -> demo_report.Measurement:
    stats = Stats(
        num_tokens=len(tokens),
        num_full_passes=num_full_passes,
        num_slim_passes=4,
        decode_ms=1e3 * len(tokens) / tokens_per_second,
    )
    return demo_report.Measurement("way", [Result([1], tokens=tokens, stats=stats)])


def test_demo_says_what_pays() -> None:
    tokens = list(range(12))
    plain, two, three = measurement(10.0, 12, tokens), measurement(15.0, 8, tokens), measurement(6.0, 6, tokens)
    drafter, slim = demo_report.verdicts(plain, two, three, 0.5)
    assert drafter == "The drafter pays here: 1.50 times the speed of plain decoding."
    assert slim.startswith("The slim tier does not pay here: 0.40 times the speed of two tiers.")
    assert (
        "takes 0.50 of the time of a full pass of as many rows, and 4 of them brought the full passes from 8 to 6."
        in slim
    )
    assert "makes no difference" in next(demo_report.verdicts(plain, plain, three, 0.5))
    assert demo_report.fastest([plain, two, three]) == "Fastest here: way, 15.0 tokens/s, 1.50 times plain."
    assert demo_report.fastest([plain, three]) == "Fastest here: plain decoding, 10.0 tokens/s."
    assert plain.num_same(two) == 1
    assert plain.num_same(measurement(10.0, 12, [*tokens[:-1], 99])) == 0


@pytest.mark.model
def test_demo_and_generate_with_the_real_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("demo", "--max-new-tokens", "4")
    assert code == 0
    assert not ANSI.search(out)
    assert re.search(r"^three tiers .* yes$", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 80
    code, out, _ = run("generate", "What is the capital of France?", "--json", "--max-new-tokens", "16")
    assert code == 0
    assert json.loads(out)["text"] == "The capital of France is Paris."
    assert json.loads(out)["finish_reason"] == "eos"
