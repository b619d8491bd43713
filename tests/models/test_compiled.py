"""The compiled decoder against the eager one, through the real compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from minivllm import LLM, EngineConfig, SamplingParams
from minivllm.attention.cpu import cpu_backend
from minivllm.components import Components
from minivllm.models import aot
from minivllm.models.compile_cache import compile_model
from minivllm.models.compiled import FEW, CompiledDecoder, compile_decoder
from minivllm.models.decoder import Decoder
from minivllm.models.int4 import FEW_ROWS, quantize_decoder
from minivllm.models.weights import load_model
from minivllm.worker.model_runner import ModelRunner
from tests.models.conftest import paged_logits, relative_error, tiny_model

pytest.importorskip("numba")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler"),
]
# Windows in one layer, biases, norms of q and k: what a layer may have.
KIND = "qwen3, biases and mixed layers"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    tiny_model(KIND).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def eager(checkpoint: Path) -> Decoder:
    decoder = load_model(checkpoint, dtype=torch.float32)
    decoder.attention_backend = cpu_backend(torch.float32)
    return decoder


@pytest.fixture(scope="module")
def folder(checkpoint: Path, cache: Path) -> Path:
    """Compiled without packed weights, which is most of the compiler's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIVLLM_CACHE", str(cache))
        patch.setattr(aot, "INDUCTOR", {**aot.INDUCTOR, "freezing": False, "max_autotune": False})
        return compile_model(checkpoint, torch.float32)


def prompts(decoder: Decoder, lengths: tuple[int, ...] = (1, 4, 9, 17)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(decoder.config.vocab_size, (n,), generator=generator) for n in lengths]


@pytest.mark.parametrize("chunks", [(1,), (64,), (1, 5, 3)], ids=["decodes", "prefills", "mixed"])
def test_any_batch_comes_out_as_the_eager_decoder_has_it(folder: Path, eager: Decoder, chunks: tuple[int, ...]) -> None:
    decoder = CompiledDecoder(folder, eager.config, eager.attention_backend)
    expected = paged_logits(eager, prompts(eager), chunks)
    for ours, reference in zip(paged_logits(decoder, prompts(eager), chunks), expected, strict=True):
        assert relative_error(ours, reference) < 1e-5


def test_the_engine_uses_it_unless_told_otherwise(folder: Path, checkpoint: Path, cache: Path, monkeypatch) -> None:
    monkeypatch.setenv("MINIVLLM_CACHE", str(cache))
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    answers = []
    for settings, parts, word in (
        ({}, {}, "compiled"),
        ({"enforce_eager": True}, {}, "eager"),
        ({"attention_backend": "reference"}, {}, "eager"),
        ({}, {"write_kv": write_kv}, "eager"),  # a part that works inside the decoder
    ):
        config = EngineConfig(model=str(checkpoint), dtype="float32", num_gpu_blocks_override=50, **settings)
        runner = ModelRunner(config, Components(parts))
        assert f"float32, {word}, attention" in runner.describe()
        llm = LLM.from_executor(runner, runner.config, vocab_size=runner.vocab_size, model_max_len=runner.max_model_len)
        outputs = llm.generate([[5, 6, 7], [8], list(range(1, 40))], params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert all(answer == answers[0] for answer in answers)


def write_kv(*arguments: torch.Tensor) -> None:
    cpu_backend(torch.float32).write_kv(*arguments)


def test_a_truncated_file_is_told(folder: Path, eager: Decoder, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    (broken / "weights.bin").write_bytes((folder / "weights.bin").read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"weights\.bin has \d+ bytes, not \d+"):
        CompiledDecoder(broken, eager.config, eager.attention_backend)


def test_no_rows_make_no_logits(folder: Path, eager: Decoder) -> None:
    decoder = CompiledDecoder(folder, eager.config, eager.attention_backend)
    assert decoder.logits(torch.empty(0, eager.config.hidden_size)).shape == (0, eager.config.vocab_size)


def test_float16_is_refused_by_name(tmp_path: Path, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="bfloat16 and float32"):
        compile_decoder(load_model(checkpoint, dtype=torch.float16), tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_packed_weights_too(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model("llama, tied", hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "checkpoint")
    decoder = load_model(tmp_path / "checkpoint", dtype=dtype)
    decoder.attention_backend = cpu_backend(dtype)
    (tmp_path / "compiled").mkdir()
    try:
        compile_decoder(decoder, tmp_path / "compiled")  # compares with the eager one before it returns
    except ValueError as error:
        if "in a form that cannot be saved" not in str(error):
            raise
        pytest.skip(str(error))  # a processor of another make: the refusal is what is promised there
    ours = CompiledDecoder(tmp_path / "compiled", decoder.config, decoder.attention_backend)
    exact = load_model(tmp_path / "checkpoint", dtype=torch.float32)
    exact.attention_backend = cpu_backend(torch.float32)
    computed = [paged_logits(model, prompts(exact), (1, 7)) for model in (ours, decoder, exact)]
    for got, eager, reference in zip(*computed, strict=True):
        # bfloat16 rounds at other places when operations are fused: it may be as far from float32 as eager's roundings are
        limit = 1e-5 if dtype == torch.float32 else 1.5 * relative_error(eager.float(), reference)
        assert relative_error(got.float(), reference) < limit


def test_int4_for_few_rows_and_bfloat16_of_the_same_numbers_for_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four prompts of one token are few rows; whole prompts are many."""
    monkeypatch.setattr(aot, "INDUCTOR", {**aot.INDUCTOR, "freezing": False, "max_autotune": False})
    model = tiny_model("llama, tied", hidden_size=128, intermediate_size=256, num_hidden_layers=1)
    model.save_pretrained(tmp_path / "checkpoint")
    decoder = load_model(tmp_path / "checkpoint", dtype=torch.float32)
    decoder.attention_backend = cpu_backend(torch.float32)
    full = paged_logits(decoder, prompts(decoder), (64,))
    quantize_decoder(decoder, keep_unpacked=True)
    (tmp_path / "compiled").mkdir()
    compile_decoder(decoder, tmp_path / "compiled")
    ours = CompiledDecoder(tmp_path / "compiled", decoder.config, decoder.attention_backend)
    assert FEW in ours._libraries and len(prompts(decoder)) <= FEW_ROWS
    for chunks in ((1,), (64,)):
        expected = paged_logits(decoder, prompts(decoder), chunks)
        for got, eager, exact in zip(paged_logits(ours, prompts(decoder), chunks), expected, full, strict=True):
            assert relative_error(got, eager) < 1e-3 < relative_error(got, exact)  # rounded to int4, and as eager rounds
