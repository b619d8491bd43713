"""Tokenizers for the tests of text: a small one and the real model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minivllm.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import make_byte_level


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return make_byte_level()


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_folder(smollm2)


@pytest.fixture
def model_folder(tmp_path: Path, byte_level: Tokenizer) -> Path:
    """A model folder with the byte-level tokenizer, for tests that add files to it."""
    byte_level.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>", "lstrip": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return tmp_path
