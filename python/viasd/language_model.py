"""The calls that most people need: ``viasd.load`` and what it returns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from viasd.decode import Admission, Costs, DecodeRun, Request, Result, Speculation, Token, measure_costs
from viasd.decode.request import LogitsProcessor, Stopping
from viasd.drafters import Drafter, ModelDrafter, PromptLookup, SelfDrafter
from viasd.errors import DecodeError, DecodeInterrupted, InvalidInput, UnsupportedModel
from viasd.models import Model, SkipModel, TransformersModel
from viasd.models.hf_mapping import UnknownArchitecture
from viasd.routing import Route
from viasd.sampling import Sampling
from viasd.text import Detokenizer, Prompt, StopStrings, as_lists, cut_at, encode, is_batch

# Shares of the middle sub-layers that routes bypass before a search has found better ones. Measured on the embedded
# model: evenly spread, 45 % of the middle leaves 1 % of the full model's choices; a seventh of the attentions, 75 %.
SLIM_SHARES = {"attention": 0.15, "mlp": 0.0}
IMPLEMENTATIONS = ("auto", "native", "transformers")
SELF_DRAFT_SHARES = {"attention": 0.25, "mlp": 0.1}


class LanguageModel:
    """A model, what drafts for it, and the tiers that verify. Made by ``viasd.load``.

    Attributes:
        model: the target.
        tokenizer: None where the model came without one; prompts are ids then, and results have no text.
        drafter: None for plain decoding.
        route: the slim tier's; None where there are two tiers.
        eos_token_ids: the model's own end-of-sequence tokens.
        costs: what the adaptive draft length weighs; measured before the first run that drafts, then kept.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Any = None,
        *,
        drafter: Drafter | None = None,
        route: Route | None = None,
        speculation: Speculation | None = None,
        eos_token_ids: Sequence[int] = (),
        costs: Costs | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.route = route
        self.speculation = speculation or Speculation()
        self.eos_token_ids = tuple(eos_token_ids)
        self.costs = costs
        self._measuring = threading.Lock()

    @property
    def name(self) -> str:
        return self.model.name

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        seed: int | Sequence[int] | None = None,
        speculation: Speculation | None = None,
        logits_processor: LogitsProcessor | None = None,
        stopping: Stopping | None = None,
        admission: Admission | None = None,
        progress: bool | None = None,
        **settings: Any,
    ) -> Any:
        """Continue a prompt, or any number of them.

        The output is distributed exactly as the full model's own, and greedy output (``temperature=0``) is the full
        model's token for token, unless ``speculation`` asks for the approximate tiered mode. Many prompts are decoded
        side by side, as many at a time as memory holds; none changes another's output.

        Args:
            prompt: text, chat messages (dicts with "role" and "content"; the chat template is applied) or ids, as a
                list, tensor or array; or a list of such prompts; or [B, n] ids, which are B prompts.
            seed: of the request's own coins. The same seed gives the same output whatever else is in the call; give a
                list, one per prompt, to sample the same prompt in different ways.
            speculation: in place of the one that the model was loaded with.
            logits_processor, stopping: see ``viasd.Request``.
            admission: how many prompts are decoded at a time, if not as many as fit.
            progress: show a bar; None shows one on a terminal, for more than 8 prompts.
            settings: ``max_new_tokens``, ``temperature`` and all others of ``viasd.Sampling``.

        Returns:
            A ``Result``; for a list of prompts a list of them, in order.

        Raises:
            InvalidInput: a prompt or a setting that cannot work.
            DecodeError: a request broke off; its ``results`` hold what all of them generated.
            DecodeInterrupted: Ctrl-C; likewise.
        """
        prompt = as_lists(prompt)
        prompts = list(prompt) if is_batch(prompt) else [prompt]
        hooks = {"speculation": speculation, "logits_processor": logits_processor, "stopping": stopping}
        run = self._run(prompts, _sampling(settings), seed, hooks, admission)
        interrupted = False
        try:
            for _ in _with_bar(run, progress):
                pass
        except KeyboardInterrupt:
            interrupted = True
        for request, result in zip(run.requests, run.results, strict=True):
            result.text = self._text(result.tokens, request.sampling.stop)
        if interrupted:
            raise DecodeInterrupted(run.results)
        broken = [f"prompt {i}: {result.error}" for i, result in enumerate(run.results) if result.error]
        if broken:
            raise DecodeError("; ".join(broken), run.results)
        return run.results if is_batch(prompt) else run.results[0]

    def stream(
        self,
        prompt: Prompt,
        *,
        seed: int | None = None,
        speculation: Speculation | None = None,
        logits_processor: LogitsProcessor | None = None,
        stopping: Stopping | None = None,
        **settings: Any,
    ) -> Stream:
        """Continue one prompt and hand out each token as soon as it is final; arguments as in ``generate``."""
        prompt = as_lists(prompt)
        if is_batch(prompt):
            raise InvalidInput("prompt: stream takes one prompt, got a list of them")
        hooks = {"speculation": speculation, "logits_processor": logits_processor, "stopping": stopping}
        return Stream(self._run([prompt], _sampling(settings), seed, hooks), self.tokenizer)

    def _run(
        self,
        prompts: Sequence[Any],
        settings: Sampling,
        seed: int | Sequence[int] | None,
        hooks: dict[str, Any],
        admission: Admission | None = None,
    ) -> DecodeRun:
        if isinstance(seed, Sequence) and len(seed) != len(prompts):
            raise InvalidInput(f"seed must be one number or one per prompt, {len(prompts)}, got {len(seed)}")
        eos = self.eos_token_ids if settings.eos_token_ids is None else settings.eos_token_ids
        requests = []
        for i, prompt in enumerate(prompts):
            own_seed = seed[i] if isinstance(seed, Sequence) else seed
            if own_seed is None:  # a greedy request tosses no coin, and leaves torch's generator alone
                own_seed = int(torch.randint(2**62, ())) if settings.temperature > 0 else 0
            ids = encode(prompt, self.tokenizer)
            own_hooks = hooks
            if settings.stop:
                own_hooks = {**hooks, "stopping": self._stopping(settings, len(ids), hooks["stopping"])}
            requests.append(Request(ids, replace(settings, seed=own_seed, eos_token_ids=eos), **own_hooks))
        return DecodeRun(
            self.model,
            requests,
            drafter=self.drafter,
            route=self.route,
            speculation=self.speculation,
            costs=self.measured_costs(hooks["speculation"]),
            admission=admission,
        )

    def _stopping(self, settings: Sampling, num_prompt: int, other: Stopping | None) -> Stopping:
        strings = StopStrings(settings.stop, self.tokenizer)

        def stopping(tokens: list[int]) -> bool:
            output = tokens[num_prompt:]
            found = len(output) > settings.min_new_tokens and strings.ends(output)
            return found or bool(other and other(tokens))

        return stopping

    def measured_costs(self, speculation: Speculation | None = None) -> Costs | None:
        """What passes cost here, measured at the first call that needs it; None where it may still be unknown."""
        if self.drafter and (speculation or self.speculation).adaptive:
            with self._measuring:  # two measurements would differ, and one seed's outputs with them
                self.costs = self.costs or measure_costs(self.model, self.drafter, self.route)
        return self.costs

    def _text(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        return cut_at(stop, self.tokenizer.decode(tokens, skip_special_tokens=True)) if self.tokenizer else ""


class Stream(Iterator[Token]):
    """Tokens as they become final. ``result`` is what there is so far, after an interruption too."""

    def __init__(self, run: DecodeRun, tokenizer: Any) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self._stop = run.requests[0].sampling.stop
        self._tokens = self._generate()

    def __next__(self) -> Token:
        return next(self._tokens)

    @property
    def result(self) -> Result:
        result = self._run.results[0]
        if self._tokenizer:
            result.text = cut_at(self._stop, self._tokenizer.decode(result.tokens, skip_special_tokens=True))
        return result

    def _generate(self) -> Iterator[Token]:
        detokenizer = Detokenizer(self._tokenizer, self._stop)
        result = self._run.results[0]
        for cycle in self._run.cycles():
            for progress in cycle:
                last = len(progress.tokens) - 1 if result.finish_reason else None
                for i, (token, tier) in enumerate(zip(progress.tokens, progress.tiers, strict=True)):
                    text = detokenizer.push(token)
                    yield Token(token, text + detokenizer.flush() if i == last else text, tier)
        if result.error:
            raise DecodeError(result.error, [self.result])


def load(
    model: str | Path | nn.Module | Model | None = None,
    *,
    drafter: str | Path | nn.Module | Drafter | None = "prompt-lookup",
    route: str | Path | Route | None = None,
    tokenizer: Any = None,
    speculation: Speculation | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    implementation: str = "auto",
    progress: Callable[[str, int, int], None] | None = None,
) -> LanguageModel:
    """A language model that decodes in tiers.

    Args:
        model: a folder or hub name, a Transformers model (stays untouched; what happens to it later is not seen), or
            None for the embedded default, SmolLM2-135M-Instruct.
        drafter: "prompt-lookup", "self" (the model itself on a route lighter than the slim tier's default), a smaller
            model with the same vocabulary or its path, any ``Drafter``, or None for plain decoding.
        route: the slim verifier between drafter and full model: a ``Route``, the path of one, "default" (a seventh of
            the middle attentions bypassed, evenly spread), or None for two tiers.
        tokenizer: for a model that comes without one.
        speculation: draft length, gate and the like.
        device, dtype: where and how a model that is loaded here runs; default: CUDA where there is one, float32 on a
            CPU, else the checkpoint's.
        implementation: of the model's passes, and of a model that drafts. "native": viasd's own, for architectures that
            it knows (Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3), in C++ on a CPU (float32 or bfloat16) and in Triton
            on a GPU; "transformers": the model's own forward, for any decoder-only model; "auto": native where it can
            be. ``model.reason`` says why it is what it is.
        progress: told ``(what, done, total)`` while the embedded default is converted, once.

    Raises:
        InvalidInput, UnsupportedModel, RouteMismatch, ModelNotInstalled: see their docstrings.
    """
    if not isinstance(speculation, (Speculation, type(None))):
        raise InvalidInput(f"speculation must be a Speculation or None, got {type(speculation).__name__}")
    loader = _Loader(device, dtype, implementation)
    target, tokenizer, eos = _target(model, tokenizer, loader, progress)
    return LanguageModel(
        target,
        tokenizer,
        drafter=_drafter(drafter, target, tokenizer, loader),
        route=_route(route, target),
        speculation=speculation,
        eos_token_ids=eos,
    )


@dataclass(frozen=True)
class _Loader:
    """Turns paths and Transformers models into models over token slots, all in the same way."""

    device: str | torch.device | None
    dtype: torch.dtype | None
    implementation: str

    def __post_init__(self) -> None:
        if self.implementation not in IMPLEMENTATIONS:
            choices = ", ".join(map(repr, IMPLEMENTATIONS))
            raise InvalidInput(f"implementation must be one of {choices}, got {self.implementation!r}")

    def over_slots(self, module: nn.Module, name: str | None = None, *, path: str | Path | None = None) -> Model:
        """``path``: what the module was read from for us alone, so that it may be emptied and read again."""
        reason = None
        if self.implementation != "transformers":
            try:
                return SkipModel(module, name, consume=path is not None)
            except UnsupportedModel as error:
                if self.implementation == "native":
                    raise
                reason = f"not native: {error}"
                if path is not None and not isinstance(error, UnknownArchitecture):
                    module, _ = self.read(path, next(module.parameters()).device)
        return TransformersModel(module, name, reason=reason)

    def read(self, path: str | Path, device: Any = None) -> tuple[nn.Module, Any]:
        """A Transformers model and its tokenizer (None where the folder has none)."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        device = torch.device(self.device or device or ("cuda" if torch.cuda.is_available() else "cpu"))
        dtype = self.dtype or (torch.float32 if device.type == "cpu" else "auto")
        if isinstance(path, Path) or path.startswith(("/", ".", "~")):
            if not Path(path).expanduser().is_dir():
                raise InvalidInput(f"model: no folder {path}")  # the hub's own message for such a name helps nobody
            path = Path(path).expanduser()
        try:
            model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype).to(device).eval()
        except (OSError, ValueError) as error:
            raise InvalidInput(f"model: cannot load {path}: {str(error).splitlines()[0]}") from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError):
            tokenizer = None
        return model, tokenizer


def _target(model: Any, tokenizer: Any, loader: _Loader, progress: Any) -> tuple[Model, Any, tuple[int, ...]]:
    if model is None:
        from viasd.models.embedded import embedded_model

        model = embedded_model(progress=progress)
    if isinstance(model, (str, Path)):
        name = Path(model).name
        module, own_tokenizer = loader.read(model)
        model, tokenizer = loader.over_slots(module, name, path=model), tokenizer or own_tokenizer
    elif isinstance(model, nn.Module):
        model = loader.over_slots(model)
    elif not (hasattr(model, "forward") and hasattr(model, "new_cache")):
        raise InvalidInput(
            f"model must be a path, a Transformers model, a viasd Model or None, got {type(model).__name__}"
        )
    return model, tokenizer, getattr(model, "eos_token_ids", ())


def _route(route: str | Path | Route | None, model: Model) -> Route | None:
    if route == "default":
        spread = Route.spread(model.num_layers, **SLIM_SHARES)
        route = replace(spread, model=model.name, config_hash=getattr(model, "config_hash", None))
    elif isinstance(route, (str, Path)):
        route = Route.load(Path(route).expanduser())
    if route is not None:
        if not isinstance(route, Route):
            raise InvalidInput(f"route must be a Route, a path, 'default' or None, got {type(route).__name__}")
        model.check_route(route)
    return route


def _drafter(drafter: Any, target: Model, tokenizer: Any, loader: _Loader) -> Drafter | None:
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if drafter == "prompt-lookup":
        return PromptLookup()
    if drafter == "self":
        return SelfDrafter(target, Route.spread(target.num_layers, **SELF_DRAFT_SHARES))
    own_tokenizer = None
    if isinstance(drafter, (str, Path)):
        if not Path(drafter).expanduser().is_dir():
            raise InvalidInput(
                f"drafter must be 'prompt-lookup', 'self', a model, the folder of one, or None; got {drafter!r}"
            )
        name = Path(drafter).name
        module, own_tokenizer = loader.read(drafter, target.device)
        small: Model = loader.over_slots(module, name, path=drafter)
    elif isinstance(drafter, nn.Module):
        small = loader.over_slots(drafter)
    elif hasattr(drafter, "forward") and hasattr(drafter, "new_cache"):
        small = drafter
    else:
        raise InvalidInput(f"drafter must be a name, a path, a model, a Drafter or None, got {type(drafter).__name__}")
    if small.device != target.device:
        raise InvalidInput(f"drafter: it is on {small.device} and the model on {target.device}; move one of them")
    _check_vocabularies(small, own_tokenizer, target, tokenizer)
    return ModelDrafter(small)


def _check_vocabularies(small: Model, small_tokenizer: Any, target: Model, tokenizer: Any) -> None:
    """Raise ``InvalidInput`` unless an id means the same token to both, as far as that can be known."""
    if small_tokenizer is not None and tokenizer is not None:
        theirs = {id: token for token, id in small_tokenizer.get_vocab().items()}
        ours = {id: token for token, id in tokenizer.get_vocab().items()}
        differing = sorted(id for id in theirs.keys() & ours.keys() if theirs[id] != ours[id])
        if differing:
            id = differing[0]
            raise InvalidInput(
                f"drafter: its vocabulary differs from the model's in {len(differing)} ids; "
                f"id {id} is {theirs[id]!r} there and {ours[id]!r} here"
            )
    elif small.vocab_size != target.vocab_size:
        raise InvalidInput(
            f"drafter: it has {small.vocab_size} tokens and the model {target.vocab_size}, "
            "and there are no two tokenizers to show that the common ids agree"
        )


def _sampling(settings: dict[str, Any]) -> Sampling:
    """The settings of a call; a single end-of-sequence id and lists of ids are taken too."""
    names = [field.name for field in fields(Sampling) if field.name != "seed"]
    unknown = sorted(settings.keys() - set(names))
    if unknown:
        raise InvalidInput(f"{unknown[0]} is not a setting; there are {', '.join(names)}")
    eos = settings.get("eos_token_ids")
    if eos is not None:
        settings = {**settings, "eos_token_ids": (eos,) if isinstance(eos, int) else tuple(eos)}
    return Sampling(**settings)


def _with_bar(run: DecodeRun, progress: bool | None) -> Iterator[Any]:
    """The run's cycles, with a bar that counts finished requests and tokens."""
    from tqdm import tqdm  # Transformers requires it

    hidden = not progress if progress is not None else len(run.results) <= 8 or not sys.stderr.isatty()
    with tqdm(total=len(run.results), unit="prompt", disable=hidden) as bar:
        num_tokens = 0
        for cycle in run.cycles():
            num_tokens += sum(len(own.tokens) for own in cycle)
            bar.update(sum(run.results[own.index].finish_reason is not None for own in cycle))
            if bar.format_dict["elapsed"]:
                bar.set_postfix_str(f"{num_tokens / bar.format_dict['elapsed']:.0f} tokens/s", refresh=False)
            yield cycle
