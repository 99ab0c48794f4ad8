"""Files that this user may not read are named in one line, with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxkv import models
from jaxkv.cli import main
from jaxkv.errors import UserError
from tests.models.folders import deny
from tests.models.gguf.files import hf_model, write_gguf
from tests.tiny import write_tiny

FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json", "chat_template.jinja")  # fmt: skip


def check(path: Path, model: Path, capsys) -> None:
    """Loading the model names the file."""
    message = f"cannot read {path}: Permission denied; check that it is a file that you may read"
    with pytest.raises(UserError) as error:
        models.load(model)
    assert str(error.value) == message
    assert main(["generate", "Hi", "--model", str(model)]) == 2
    assert capsys.readouterr().err == f"jaxkv: error: {message}\n"


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_folder(name, tmp_path, monkeypatch, capsys):
    path = write_tiny(tmp_path / "tiny") / name
    path.exists() or path.write_text("{}")
    deny(monkeypatch, path)
    check(path, path.parent, capsys)


@pytest.mark.parametrize("name", ["model.gguf", "model"])
def test_a_gguf_file(name, tmp_path, monkeypatch, capsys):
    path = write_gguf(tmp_path / name, *hf_model(tmp_path, "llama2"))
    deny(monkeypatch, path)
    check(path, path, capsys)
