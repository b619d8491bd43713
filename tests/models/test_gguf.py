"""GGUF files become the Hugging Face folder they were made from."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFReader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers import Tokenizer

from minivllm.models.gguf import SERVED_TYPES, convert_gguf
from minivllm.models.hub import resolve_model
from minivllm.models.registry import ModelConfig, RopeConfig, read_json
from minivllm.models.rope import inverse_frequencies
from minivllm.models.weights import load_model

from .conftest import relative_error, tiny_model
from .tiny_gguf import TOKENS, VOCAB_SIZE, write_gguf

FAMILIES = ["llama", "llama, tied", "llama, biases", "qwen2", "qwen3"]


def converted(path: Path, **options: Any) -> Path:
    folder = path.parent / "converted"
    folder.mkdir()
    convert_gguf(path, folder, **options)
    return folder


def tiny(kind: str = "llama", **overrides: Any) -> transformers.PreTrainedModel:
    return tiny_model(kind, vocab_size=VOCAB_SIZE, **overrides)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_float32_file_gives_back_the_model_it_was_made_from(tmp_path: Path, kind: str) -> None:
    model = tiny(kind, **({"head_dim": 32} if kind == "qwen3" else {}))
    folder = converted(write_gguf(tmp_path / "tiny.gguf", model))
    tensors, expected = load_file(folder / "model.safetensors"), model.state_dict()
    if model.config.tie_word_embeddings:
        expected.pop("lm_head.weight")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    prompt = torch.arange(20)
    with torch.inference_mode():
        logits = model(prompt[None]).logits[0]
    assert relative_error(load_model(folder, dtype=torch.float32).full_forward(prompt), logits) < 1e-5


@pytest.mark.parametrize("tensor_type", SERVED_TYPES)
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_each_type_dequantizes_as_transformers_does(tmp_path: Path, kind: str, tensor_type: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny(kind), tensor_type=tensor_type)
    folder = converted(path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    theirs = reference.state_dict()
    dtype = {"F32": torch.float32, "F16": torch.float16}.get(tensor_type, torch.bfloat16)
    ours = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype is dtype
        assert torch.equal(tensor, theirs[name].to(dtype)), name


def test_transformers_opens_the_converted_folder(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "tiny.gguf", tiny("qwen3", head_dim=32)))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert transformers.AutoTokenizer.from_pretrained(folder).chat_template == "{{ messages }}"


def test_large_weights_are_written_in_shards(tmp_path: Path) -> None:
    model = tiny()
    folder = converted(write_gguf(tmp_path / "tiny.gguf", model), max_shard_bytes=100_000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    loaded = dict(load_model(folder, dtype=torch.float32).checkpoint_tensors())
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in loaded.items())


def test_the_config_says_what_the_metadata_says(tmp_path: Path) -> None:
    model = tiny("llama, tied", rms_norm_eps=1e-5)
    config = read_json(converted(write_gguf(tmp_path / "tiny.gguf", model, tensor_type="Q8_0")) / "config.json")
    expected = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "dtype": "bfloat16"}
    assert {key: config[key] for key in expected} == expected
    assert config["vocab_size"] == VOCAB_SIZE


def test_end_of_turn_is_an_end_token_too(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 2}
    folder = converted(write_gguf(tmp_path / "tiny.gguf", tiny(), metadata=ends))
    assert read_json(folder / "generation_config.json")["eos_token_id"] == [0, 2]
    assert ModelConfig.from_folder(folder).eos_token_ids == (0, 2)


def test_a_llama_file_with_a_window_is_a_mistral(tmp_path: Path) -> None:
    model = tiny("mistral, window of 7")
    folder = converted(write_gguf(tmp_path / "tiny.gguf", model, metadata={"llama.attention.sliding_window": 7}))
    config = ModelConfig.from_folder(folder)
    assert (config.architecture, config.sliding_window) == ("MistralForCausalLM", (7, 7, 7))
    prompt = torch.arange(20)
    with torch.inference_mode():
        logits = model(prompt[None]).logits[0]
    assert relative_error(load_model(folder, dtype=torch.float32).full_forward(prompt), logits) < 1e-5


def test_llama3_rope_is_recovered_from_its_divisors(tmp_path: Path) -> None:
    rope = RopeConfig(500000.0, "llama3", factor=32.0)
    model = tiny(rope_parameters={"rope_type": "default", "rope_theta": 500000.0})
    divisors = (inverse_frequencies(RopeConfig(500000.0), 16) / inverse_frequencies(rope, 16)).numpy()
    path = write_gguf(tmp_path / "tiny.gguf", model, extra_tensors={"rope_freqs.weight": divisors})
    assert ModelConfig.from_folder(converted(path)).rope == rope


def test_other_divisors_are_refused(tmp_path: Path) -> None:
    divisors = np.linspace(1, 3, 8, dtype=np.float32)
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), extra_tensors={"rope_freqs.weight": divisors})
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        converted(path)


def test_linear_rope_scaling_is_kept_and_others_are_refused(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    folder = converted(write_gguf(tmp_path / "tiny.gguf", tiny(), metadata=keys))
    assert ModelConfig.from_folder(folder).rope == RopeConfig(10000.0, "linear", 4.0)
    path = write_gguf(tmp_path / "yarn.gguf", tiny(), metadata={**keys, "llama.rope.scaling.type": "yarn"})
    with pytest.raises(ValueError, match="rope scaling 'yarn', which is not served"):
        convert_gguf(path, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_type": "Q5_0"}, r"'token_embd\.weight' is Q5_0, which is not served.*F32, F16, BF16, Q8_0, Q4_0, Q4_1"),
        ({"metadata": {"general.architecture": "gemma3"}}, "'gemma3' model, which is not served.*llama, qwen2, qwen3"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "only part of a head"),
        ({"metadata": {"llama.block_count": None}}, r"lacks the metadata key 'llama\.block_count'"),
        ({"tokenizer_model": "llama"}, "tokenizer of kind 'llama'"),
        ({"pre": "gpt-4o"}, "called 'gpt-4o', which is not served; minivllm knows gpt-2, smollm, llama-bpe and qwen2"),
        ({"extra_tensors": {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}}, "attn_sinks.* has no place"),
    ],
)
def test_what_is_not_served_is_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), **options)
    with pytest.raises(ValueError, match=message):
        converted(path)


@pytest.mark.parametrize("keep", [0, 2, 20, 1000, 0.3, 0.9, 0.999])
def test_a_file_cut_short_is_named(tmp_path: Path, keep: float) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny())
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    with pytest.raises(ValueError, match=r"tiny\.gguf is (damaged or cut short|not a GGUF file)"):
        converted(path)


def offsets_of(path: Path) -> dict[str, list[tuple[int, int]]]:
    """Of each key and tensor of a file, where its parts stand in the header, as (offset, bytes)."""
    reader = GGUFReader(path)
    fields = [(f.name, f) for f in reader.fields.values() if not f.name.startswith("GGUF.")]
    found: dict[str, list[tuple[int, int]]] = {"the counts": [(8, 8), (16, 8)]}
    for name, field in fields + [(t.name, t.field) for t in reader.tensors]:
        at, found[name] = field.offset, []
        for part in field.parts[:8]:
            found[name].append((at, part.nbytes))
            at += part.nbytes
    return found


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, list[tuple[int, int]]]]:
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny())
    return path.read_bytes(), offsets_of(path)


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_header_with_any_number_in_it_is_refused_by_name_or_read(
    tmp_path: Path, whole_file: tuple[bytes, dict[str, list[tuple[int, int]]]], data: st.DataObject
) -> None:
    """Lengths, counts, types and dimensions are a stranger's: never a crash, an endless loop or a huge allocation."""
    content, places = bytearray(whole_file[0]), whole_file[1]
    at, size = data.draw(st.sampled_from(places[data.draw(st.sampled_from(sorted(places)))]))
    large = [0, 1, 3, 8, 9, 10, 2**16, 2**31, 2**32 - 1, 2**40, 2**60, 2**63, 2**64 - 1]
    if size in (4, 8):
        content[at : at + size] = (data.draw(st.sampled_from(large)) % 256**size).to_bytes(size, "little")
    elif size:
        content[at + data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    path, folder = tmp_path / "strange.gguf", Path(tempfile.mkdtemp(dir=tmp_path))
    path.write_bytes(content)
    try:
        convert_gguf(path, folder)
    except ValueError as error:
        assert str(path) in str(error)


def test_an_array_that_says_it_has_more_than_the_file_is_named(tmp_path: Path) -> None:
    """The gguf package would read it until memory ends."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny())
    at = offsets_of(path)["general.name"][2][0]
    content = bytearray(path.read_bytes())
    # a text becomes an array (9) of bytes (0), a number of them that is read in seconds: a test that fails must end, too
    content[at : at + 16] = struct.pack("<IIQ", 9, 0, 1_000_000)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"the metadata key 'general\.name' needs 1000000 bytes where"):
        converted(path)


def test_a_tensor_that_does_not_fit_the_metadata_is_named_before_anything_is_written(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), metadata={"llama.attention.head_count_kv": 4})
    with pytest.raises(ValueError, match=r"tensor 'blk\.0\.attn_k\.weight' has shape .*metadata asks for"):
        converted(path)
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(ValueError):
        convert_gguf(path, folder)
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 2**31),
        ("llama.attention.head_count", 0),
        ("llama.attention.head_count", "two"),
        ("llama.embedding_length", 1.5),
        ("llama.rope.freq_base", "high"),
        ("tokenizer.ggml.pre", 3),
        ("tokenizer.chat_template", 3),
        ("tokenizer.ggml.eos_token_id", "</s>"),
    ],
)
def test_metadata_of_another_kind_or_size_is_named(tmp_path: Path, key: str, value: Any) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny(), metadata={key: value})
    with pytest.raises(ValueError, match=key.rpartition(".")[2] if key != "llama.block_count" else "num_hidden_layers"):
        converted(path)


def test_a_gguf_path_is_converted_once_and_found_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    path = write_gguf(tmp_path / "a.gguf", tiny())
    folder = resolve_model(path)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    renamed = path.rename(tmp_path / "b.gguf")
    assert resolve_model(str(renamed)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert resolve_model(write_gguf(tmp_path / "c.gguf", tiny("qwen2"))) != folder


def encode(folder: Path, text: str) -> list[str]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).tokens


def test_smollm_tokenizers_split_digits_one_by_one(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "tiny.gguf", tiny()))
    assert encode(folder, " the 12") == ["Ġthe", "Ġ", "1", "2"]  # although "1 2" is a merge


def test_gpt2_and_llama3_tokenizers_keep_digits_together(tmp_path: Path) -> None:
    for pre in ("gpt-2", "llama-bpe"):
        path = write_gguf(tmp_path / f"{pre}.gguf", tiny(), pre=pre)
        (tmp_path / pre).mkdir()
        convert_gguf(path, tmp_path / pre)
        assert encode(tmp_path / pre, "the 12")[-1] == "12"


def test_qwen2_tokenizers_split_digits_and_compose_accents(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "tiny.gguf", tiny(), pre="qwen2"))
    assert encode(folder, "12") == ["1", "2"]
    assert encode(folder, "e\u0301") == encode(folder, "\u00e9")


def test_control_tokens_are_special_and_user_defined_ones_are_whole_but_not_special(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "tiny.gguf", tiny()))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("<|im_start|>the<think>").ids
    assert [TOKENS[i] for i in ids] == ["<|im_start|>", "t", "he", "<think>"]
    assert tokenizer.decode(ids) == "the<think>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>the<think>"


def test_bos_is_added_where_the_file_asks_for_it(tmp_path: Path) -> None:
    folder = converted(write_gguf(tmp_path / "tiny.gguf", tiny(), metadata={"tokenizer.ggml.add_bos_token": True}))
    assert encode(folder, "the") == ["<|im_start|>", "t", "he"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("the", add_special_tokens=False).tokens == ["t", "he"]
