"""The command line: `viasd demo`, `viasd generate`, `viasd info`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TextIO

from viasd.errors import ViasdError

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as error:
    if error.name not in ("typer", "rich"):
        raise
    sys.exit(f"error: the command line needs {error.name}; this installs it:\npip install 'viasd[cli]'")

import viasd
from viasd.decode import Result
from viasd.language_model import LanguageModel, Stream
from viasd.report import demo as demo_report
from viasd.report import info as info_report
from viasd.report.terminal import progress_bar, token_text

app = typer.Typer(
    help="Tiered speculative decoding: a drafter proposes, a slim tier checks, the full model has the last word.",
    add_completion=False,
)

ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Folder or hub name of a model. Default: the embedded SmolLM2-135M-Instruct."),
]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; what goes wrong on purpose is one line on stderr and exit code 2."""
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal lacks must not end the text
        getattr(stream, "reconfigure", lambda **_: None)(errors="replace")
    try:
        sys.exit(app(arguments, prog_name="viasd", standalone_mode=False) or 0)
    except typer.TyperException as error:
        _fail(error.format_message())
    except (ViasdError, OSError) as error:
        _fail(str(error))


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        print(f"viasd {version('viasd')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def demo(
    model: ModelOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 48,
) -> None:
    """Decode three prompts plainly, in two tiers and in three; show who decided what, and what paid."""
    with _progress() as report:
        lm = _load(model, report, route="default")
        measurements = demo_report.measure(demo_report.ways(lm), demo_report.PROMPTS, max_new_tokens, report)
    demo_report.show(Console(highlight=False), lm, demo_report.PROMPTS, measurements)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="The prompt. Without it and without --file: stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the prompt from this file.")] = None,
    model: ModelOption = None,
    drafter: Annotated[
        str, typer.Option(help="prompt-lookup, self, the folder of a smaller model, or none.")
    ] = "prompt-lookup",
    route: Annotated[
        str | None, typer.Option(help="The slim tier: default, or a route's JSON file. Default: two tiers.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Stop after this many tokens.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from the k most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Sample from the likeliest tokens that reach this probability.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Drop tokens less likely than this times the likeliest one.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Divide the positive logits of what prompt and output have already; above 1.")
    ] = 1.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Take this off a token's logit for each time that the output has it.")
    ] = 0.0,
    presence_penalty: Annotated[float, typer.Option(help="Take this off once the output has the token.")] = 0.0,
    min_new_tokens: Annotated[int, typer.Option(min=0, help="Do not end before this many tokens.")] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End where the text has this, and leave it out; may be repeated.")
    ] = None,
    logprobs: Annotated[
        int | None, typer.Option(min=0, help="With --json: log-probabilities, and this many likeliest tokens.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed samples the same text. Default: random.")] = None,
    mode: Annotated[
        str,
        typer.Option(
            help="exact: the full model's own output. tiered: the paper's rule, which approximates it; needs --route."
        ),
    ] = "exact",
    gate: Annotated[
        str, typer.Option(help="ratio, tv or kl: what sends a drafted token to a tier (three tiers).")
    ] = "ratio",
    gamma: Annotated[int, typer.Option(min=1, help="Most tokens drafted per cycle.")] = 15,
    adaptive: Annotated[
        bool,
        typer.Option(
            help="Draft fewer tokens, or none, where that is faster here. With --no-adaptive a seed samples the same "
            "text on every machine."
        ),
    ] = True,
    max_pending: Annotated[
        int, typer.Option(min=1, help="Ask the full model once this many tokens wait for it (three tiers).")
    ] = 8,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without chat template.")] = False,
    tiers: Annotated[bool, typer.Option(help="Colour each token by the tier that decided it (on a terminal).")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: tokens, text, tiers, stats, finish_reason.")
    ] = False,
) -> None:
    """Continue a prompt. The output is the full model's own, token for token when greedy, else in distribution."""
    text = _read_prompt(prompt, file, sys.stdin)
    if mode == "tiered" and route is None:
        raise typer.BadParameter("--mode tiered needs a slim tier: give --route")
    speculation = viasd.Speculation(
        mode=mode,  # type: ignore[arg-type]  # it refuses what it does not know
        gamma=gamma,
        adaptive=adaptive,
        max_pending=max_pending,
        gate=viasd.Gate(gate),
    )
    with _progress() as report:
        lm = _load(model, report, drafter=None if drafter == "none" else drafter, route=route, speculation=speculation)
    stream = lm.stream(
        text if raw else demo_report.chat(lm, text),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        min_new_tokens=min_new_tokens,
        stop=stop or (),
        logprobs=logprobs,
        seed=seed,
    )
    broken_off: KeyboardInterrupt | viasd.DecodeError | None = None
    try:
        _print_stream(stream, colours=tiers, silent=as_json)
    except (KeyboardInterrupt, viasd.DecodeError) as error:
        broken_off = error
    print(json.dumps(_as_json(lm, stream.result)) if as_json else "")
    if isinstance(broken_off, KeyboardInterrupt):
        raise typer.Exit(130)
    if broken_off is not None:
        raise broken_off


@app.command()
def info(model: ModelOption = None) -> None:
    """Describe the model, its tiers, the kernels, devices and versions, with the reason for each choice."""
    missing = info_report.embedded_state() if model is None else None
    lm = None
    if missing is None:
        with _progress() as report:
            lm = _load(model, report, route="default")
    info_report.show(Console(highlight=False), lm, missing)


def _read_prompt(prompt: str | None, file: Path | None, stdin: TextIO) -> str:
    """The prompt from the one place that gives it; a file's last line break is not part of it."""
    if prompt is not None and file is not None:
        raise typer.BadParameter("give the prompt either as an argument or with --file, not both")
    if prompt is not None:
        source, text = "PROMPT", prompt
    elif file is not None:
        source = "--file"
        try:
            text = file.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"--file: cannot read {file}: {error}") from error
    elif stdin.isatty():
        raise typer.BadParameter("no prompt: give PROMPT, --file, or pipe it in")
    else:
        source, text = "stdin", stdin.read().removesuffix("\n")
    if not text.strip():
        raise typer.BadParameter(f"{source}: the prompt is empty")
    return text


def _load(model: str | None, report: Any, **options: Any) -> LanguageModel:
    from transformers.utils import logging

    logging.disable_progress_bar()  # there is a bar already
    report("loading the model", 0, 0)
    return viasd.load(model, progress=report, **options)


@contextmanager
def _progress() -> Iterator[Any]:
    with progress_bar(Console(stderr=True)) as report:
        yield report


def _print_stream(stream: Stream, *, colours: bool, silent: bool) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for token in stream:
        if silent:
            continue
        if console.is_terminal:
            console.print(token_text(token.text, token.tier if colours else None), end="")
        else:
            print(token.text, end="", flush=True)


def _as_json(lm: LanguageModel, result: Result) -> dict[str, Any]:
    return {
        "model": lm.name,
        "drafter": lm.drafter.name if lm.drafter else None,
        "num_tiers": 3 if lm.route else 2,
        "prompt_tokens": result.prompt_tokens,
        "tokens": result.tokens,
        "text": result.text,
        "tiers": result.tiers,
        "finish_reason": result.finish_reason,
        "logprobs": [asdict(own) for own in result.logprobs],
        "stats": result.stats.to_dict(),
    }
