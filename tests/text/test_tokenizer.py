"""Tokenizer: what it reads from a model folder, BOS, bytes of tokens, and errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from minivllm.text.tokenizer import Tokenizer


def test_text_comes_back_from_its_token_ids(smollm2_tokenizer: Tokenizer) -> None:
    text = "Grüße, 日本語 👩‍👩‍👧 and\n\ttabs  "
    assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text)) == text


def test_encodes_as_transformers_does(smollm2: Path, smollm2_tokenizer: Tokenizer) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2)
    for text in ("Hello world", " leading", "<|im_start|>user\nhi<|im_end|>\n", "a\u200db 12345", ""):
        for add in (True, False):
            assert smollm2_tokenizer.encode(text, add_special_tokens=add) == theirs.encode(text, add_special_tokens=add)
    assert (smollm2_tokenizer.bos_token_id, smollm2_tokenizer.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert smollm2_tokenizer.vocab_size == len(theirs)
    assert set(theirs.all_special_ids) <= smollm2_tokenizer.special_ids


def test_special_tokens_are_read_as_text_or_object(model_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(model_folder)
    assert tokenizer.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    assert tokenizer.eos_token_id == tokenizer.token_to_id("<|eos|>")


def test_decode_leaves_special_tokens_out_unless_asked(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("fox"), byte_level.eos_token_id]
    assert byte_level.decode(ids) == "fox"
    assert byte_level.decode(ids, skip_special_tokens=False) == "fox<|eos|>"


def test_bos_is_added_once_by_a_tokenizer_that_adds_it(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.adds_bos
    assert sentencepiece.encode("the fox").count(1) == 1
    assert sentencepiece.encode("the fox", add_special_tokens=False).count(1) == 0


def test_bos_is_not_doubled_for_a_text_that_brings_it(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.encode("<s>the fox")[:2] == [1, sentencepiece.encode("<s>the fox")[1]]
    assert sentencepiece.encode("<s>the fox").count(1) == 1


def test_bos_written_twice_by_the_user_stays_twice(sentencepiece: Tokenizer, byte_level: Tokenizer) -> None:
    assert sentencepiece.encode("<s><s>the").count(1) == 2
    assert byte_level.encode("<|bos|><|bos|>the").count(byte_level.bos_token_id) == 2


def test_bytes_of_tokens_add_up_to_the_text(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    text = "the naïve 日本 😀 dog"
    for tokenizer in (byte_level, sentencepiece):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == text


def test_every_single_byte_has_its_token(byte_level: Tokenizer, sentencepiece: Tokenizer) -> None:
    for tokenizer in (byte_level, sentencepiece):
        assert {bytes([b]) for b in range(256)} <= {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}


def test_an_id_without_a_token_is_no_text(byte_level: Tokenizer) -> None:
    padded = byte_level.vocab_size + 7
    assert byte_level.token_bytes(padded) == b""
    assert byte_level.decode([padded]) == ""
    assert byte_level.token_to_piece(padded) is None


def test_a_negative_id_is_refused_with_the_range(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"from 0 to \d+, got -1\.\.5"):
        byte_level.decode([5, -1])


def test_lone_surrogates_are_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        byte_level.encode("\ud83d")


def test_truncation_settings_of_the_training_run_are_dropped(tmp_path: Path, byte_level: Tokenizer) -> None:
    data = json.loads(byte_level.backend.to_str())
    data["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    assert len(Tokenizer.from_folder(tmp_path).encode("the quick brown fox jumps over the lazy dog")) > 3


def test_a_folder_without_tokenizer_json_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"save_pretrained"):
        Tokenizer.from_folder(tmp_path)


def test_a_broken_tokenizer_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_text_imports_no_torch_and_no_transformers() -> None:
    code = (
        "import sys, minivllm.text.tokenizer, minivllm.text.detokenizer, minivllm.text.chat, minivllm.llm;"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
