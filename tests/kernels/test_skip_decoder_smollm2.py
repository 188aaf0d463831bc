"""SkipDecoder on a real model: prefill and chunks of real text beside Transformers' own logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_mapping import decoder_of
from skip_sequences import LIMIT, Sequences, plain
from transformers import AutoModelForCausalLM, AutoTokenizer

from viasd.models.embedded import embedded_model

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("each_implementation")]


def test_logits_of_real_text_equal_transformers() -> None:
    folder = embedded_model()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"][:150]
    sequences = Sequences(decoder_of(model), num_slots=200)
    chunks = [ids[:120], ids[120:125], *([token] for token in ids[125:128]), ids[128:]]
    logits = torch.cat([sequences.extend([chunk]).logits for chunk in chunks])
    assert (logits - plain(model, ids)).abs().max() <= LIMIT
