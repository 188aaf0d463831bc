"""Transformers' ``generate`` with tiered decoding inside."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    GenerationMode,
    StopStringCriteria,
    logits_process,
    stopping_criteria,
)

from viasd.decode import DecodeRun, Request, Result, Speculation
from viasd.drafters import Drafter
from viasd.errors import DecodeError, InvalidInput, UnsupportedModel
from viasd.language_model import LanguageModel, load
from viasd.models.fingerprint import structure_of, weights_of
from viasd.routing import Route
from viasd.sampling import Sampling

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.ASSISTED_GENERATION)
PREPARED = ("cache", "past_key_values", "use_cache", "logits_to_keep", "cache_position")  # of no use here

# Processors that certainly do not look at their place in the batch, among them all that sort.
ROWWISE = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
)


def transformers_generate(
    *,
    drafter: str | Path | nn.Module | Drafter | None = "prompt-lookup",
    route: str | Path | Route | None = None,
    speculation: Speculation | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    assistant_model: nn.Module | None = None,
    stop_strings: str | Sequence[str] | None = None,
    synced_gpus: bool | None = None,
    implementation: str = "auto",
) -> TransformersGenerate:
    """A decoding method for Transformers: ``model.generate(**inputs, custom_generate=viasd.transformers_generate())``.

    Greedy output is plain ``generate``'s token for token, sampled output has its distribution. Honoured are the
    sampling and stopping fields of the generation config, every logits processor at every drafted position, with the
    ids that precede that position, stopping criteria inside an accepted block, batches with left padding,
    ``return_dict_in_generate`` with scores and logits. Keep the returned object: it prepares a model once, and again
    when anything of it was changed: its weights, by whatever means, its parts, hooks, settings or code. What is not the
    family's own runs on the generic path, by the model's own forward. To know, each call on the native path reads the
    weights once, which takes about as long as a step of plain decoding.

    Args:
        drafter, route, speculation, implementation: see ``viasd.load``.
        tokenizer, streamer, assistant_model, stop_strings, synced_gpus: as in ``generate``, which drops them on the way
            to a decoding method or refuses them; so they are given here. ``assistant_model`` drafts in place of
            ``drafter``. A streamer gets the prompt, each token as soon as it is final, and ``end()``.

    Raises:
        InvalidInput: arguments that contradict each other, ``synced_gpus=True``, which is not offered.
    """
    if stop_strings is not None and tokenizer is None:
        raise InvalidInput("stop_strings: the tokenizer must be given too; generate does not pass its own on")
    if synced_gpus:
        raise InvalidInput("synced_gpus: each process ends when its own output does; only False or None is offered")
    options: dict[str, Any] = {"drafter": assistant_model if assistant_model is not None else drafter, "route": route}
    options |= {"speculation": speculation, "implementation": implementation, "tokenizer": tokenizer}
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings or ())
    return TransformersGenerate(options, tokenizer, streamer, strings)


class TransformersGenerate:
    """What ``transformers_generate`` returns; may be used from several threads."""

    def __init__(self, options: dict[str, Any], tokenizer: Any, streamer: Any, stop_strings: list[str]) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._streamer = streamer
        self._stop_strings = stop_strings
        self._lock = threading.Lock()
        self._prepared: _Prepared | None = None

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Called by ``generate`` with all that it has prepared.

        Args:
            model: a decoder-only causal language model in evaluation mode.
            input_ids: [B, n] prompts, padded on the left.

        Returns:
            [B, n + new] ids, or a ``GenerateDecoderOnlyOutput``, as ``generate`` does.

        Raises:
            InvalidInput: a generation mode, output or input that is not offered.
            UnsupportedModel: see ``viasd.load``.
            DecodeError: broken logits.
        """
        config = generation_config or model.generation_config
        attention_mask = _check(model, config, input_ids, model_kwargs)
        criteria = StoppingCriteriaList(stopping_criteria or [])
        if self._stop_strings:
            criteria.append(StopStringCriteria(tokenizer=self._tokenizer, stop_strings=self._stop_strings))
        lm = self._language_model(model)
        batch = _Batch(input_ids, LogitsProcessorList(logits_processor or []), criteria, lm.model.vocab_size)
        keep_logits = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
        sampling = {
            "max_new_tokens": config.max_length - input_ids.shape[1],
            "temperature": 1.0 if config.do_sample else 0.0,
            "eos_token_ids": _eos_token_ids(criteria),
        }
        requests = [
            Request(
                input_ids[b, first:].tolist(),
                Sampling(**sampling, seed=int(torch.randint(2**62, ())) if config.do_sample else 0),
                logits_processor=batch.processor(b, first) if batch.processors else None,
                stopping=batch.stopping(b, first),
                keep_logits=keep_logits,
            )
            for b, first in enumerate(_first_tokens(input_ids, attention_mask))
        ]
        run = DecodeRun(
            lm.model,
            requests,
            drafter=lm.drafter,
            route=lm.route,
            speculation=lm.speculation,
            costs=lm.measured_costs(),
        )
        self._stream(input_ids, run)
        broken = [f"row {b}: {result.error}" for b, result in enumerate(run.results) if result.error]
        if broken:
            raise DecodeError("; ".join(broken), run.results)
        return _output(input_ids, run.results, config)

    def _stream(self, input_ids: torch.Tensor, run: DecodeRun) -> None:
        if self._streamer is not None:
            self._streamer.put(input_ids.cpu())
        for cycle in run.cycles():
            for progress in cycle:
                for token in progress.tokens if self._streamer is not None else ():
                    self._streamer.put(torch.tensor([token]))
        if self._streamer is not None:
            self._streamer.end()

    @property
    def prepared(self) -> LanguageModel | None:
        """What decodes for the last model, while that lives; ``prepared.model.reason`` says how, and why so."""
        return None if self._prepared is None else self._prepared.lm

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._options, self._tokenizer, self._streamer, self._stop_strings)

    def _language_model(self, model: nn.Module) -> LanguageModel:
        """The model over token slots, made anew where another one comes or anything of it was changed.

        The generic path reads the weights where they are; the native one has its own, so they are looked at.
        """
        structure = structure_of(model)
        with self._lock:
            known = self._prepared
            same = known is not None and known.model() is model and known.structure == structure
            if known is None or not same or known.has_copies:
                weights = weights_of(model)
                if known is None or not same or known.weights != weights:
                    self._prepared = None  # its memory goes before the new one's comes
                    lm = load(model, **self._options)
                    known = self._prepared = _Prepared(weakref.ref(model, self._forget()), structure, weights, lm)
            return known.lm

    def _forget(self) -> Callable[[weakref.ref[nn.Module]], None]:
        """What to do when a model has died: nothing made of it is of use any more."""
        this = weakref.ref(self)

        def forget(dead: weakref.ref[nn.Module]) -> None:
            own = this()
            if own is not None and own._prepared is not None and own._prepared.model is dead:
                own._prepared = None

        return forget


@dataclass(frozen=True)
class _Prepared:
    model: weakref.ref[nn.Module]
    structure: tuple[object, ...]
    weights: tuple[int, ...]
    lm: LanguageModel

    @property
    def has_copies(self) -> bool:
        """Whether weights were copied when the model was prepared."""
        return self.lm.model.implementation != "transformers"


class _Batch:
    """The hooks of each row of a batch: what Transformers prepared for whole batches of padded rows."""

    def __init__(
        self, input_ids: torch.Tensor, processors: LogitsProcessorList, criteria: StoppingCriteriaList, vocab_size: int
    ) -> None:
        self.input_ids = input_ids
        self.vocab_size = vocab_size
        self.processors = processors
        self.criteria = criteria
        # Rows are handled one at a time. What may ask for its place in the batch sees a whole batch of the same row.
        self._whole_processing = not all(type(own) in ROWWISE for own in processors)
        self._whole_stopping = not all(type(own).__module__ == stopping_criteria.__name__ for own in criteria)

    def processor(self, b: int, first: int) -> Callable[[list[int], torch.Tensor], torch.Tensor]:
        def process(tokens: list[int], logits: torch.Tensor) -> torch.Tensor:
            if logits.shape[-1] < self.vocab_size:
                return logits  # a smaller drafter's: it may propose what it likes
            ids, row = self._rows(b, first, tokens, self._whole_processing)
            scores = logits.float().expand(len(ids), -1).clone()
            return self.processors(ids, scores)[row]

        return process

    def stopping(self, b: int, first: int) -> Callable[[list[int]], bool]:
        def stops(tokens: list[int]) -> bool:
            ids, row = self._rows(b, first, tokens, self._whole_stopping)
            return bool(self.criteria(ids, None)[row])

        return stops

    def _rows(self, b: int, first: int, tokens: list[int], whole: bool) -> tuple[torch.Tensor, int]:
        """The row's padding and tokens, [1 or B, n], and which of these rows it is."""
        padding = self.input_ids[b, :first]
        ids = torch.cat([padding, torch.tensor(tokens, device=padding.device)]).unsqueeze(0)
        return (ids.expand(len(self.input_ids), -1), b) if whole else (ids, 0)


def _check(model: Any, config: Any, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The attention mask, where there is padding; raises ``InvalidInput`` for what is not offered."""
    if model.training:
        raise UnsupportedModel(f"{type(model).__name__} is in training mode; call model.eval() first")
    if config.get_generation_mode() not in MODES:
        raise InvalidInput(
            f"generation mode {config.get_generation_mode().value} is not offered; greedy and sampled decoding are"
        )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False) and config.return_dict_in_generate:
            raise InvalidInput(f"{name} is not offered: tokens are not decoded one pass at a time")
    if config.guidance_scale is not None and config.guidance_scale != 1:
        raise InvalidInput(f"guidance_scale must be None or 1, got {config.guidance_scale}: its state knows no drafts")
    arguments = {name: value for name, value in model_kwargs.items() if name not in PREPARED and value is not None}
    mask = arguments.pop("attention_mask", None)
    positions = arguments.pop("position_ids", None)
    if arguments:
        raise InvalidInput(f"{sorted(arguments)[0]} is not offered; what the model gets are ids and an attention mask")
    if input_ids.ndim != 2:
        raise InvalidInput(f"input_ids must be [B, n], got shape {list(input_ids.shape)}")
    if mask is not None and ((mask.ndim != 2) or bool((mask[:, 1:] < mask[:, :-1]).any())):
        raise InvalidInput("attention_mask must be [B, n] with zeros on the left only; pad prompts on the left")
    if positions is not None:
        kept = torch.ones_like(input_ids) if mask is None else mask.long()
        if not torch.equal(positions.expand_as(input_ids) * kept, (kept.cumsum(-1) - 1).clamp(min=0) * kept):
            raise InvalidInput("position_ids must count the tokens of each row from 0, padding left out")
    return mask


def _first_tokens(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """[B] where each row's padding ends."""
    if attention_mask is None:
        return [0] * len(input_ids)
    return (input_ids.shape[1] - attention_mask.long().sum(-1)).tolist()


def _eos_token_ids(criteria: StoppingCriteriaList) -> tuple[int, ...]:
    ids = [own.eos_token_id for own in criteria if hasattr(own, "eos_token_id")]
    return tuple(int(id) for own in ids for id in torch.as_tensor(own).flatten())


def _output(input_ids: torch.Tensor, results: list[Result], config: Any) -> Any:
    """What plain ``generate`` returns; rows that ended early are padded, their scores with zeros."""
    longest = max(len(result.tokens) for result in results)
    pad = config._pad_token_tensor
    pad_token_id = 0 if pad is None else int(pad)
    new = [result.tokens + [pad_token_id] * (longest - len(result.tokens)) for result in results]
    sequences = torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)], -1)
    if not config.return_dict_in_generate:
        return sequences

    def steps(name: str) -> tuple[torch.Tensor, ...]:
        rows = [getattr(result, name) for result in results]
        zeros = torch.zeros_like(rows[0][0])
        return tuple(
            torch.stack([own[i] if i < len(own) else zeros for own in rows]).float().to(input_ids.device)
            for i in range(longest)
        )

    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=steps("scores") if config.output_scores else None,
        logits=steps("logits") if config.output_logits else None,
    )
