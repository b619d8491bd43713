"""The EAGLE head as machine code: the same drafts, found again only by those it was made for, and never in the engine's way."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minivllm import cli
from minivllm.models import aot, compile_cache
from minivllm.models.weights import load_model
from minivllm.spec_decode import eagle, eagle_compiled
from minivllm.spec_decode.drafting import Progress
from minivllm.spec_decode.eagle import EagleDrafter, EagleHead
from minivllm.spec_decode.eagle_compiled import CompiledHead, compile_head, load_compiled_head
from tests.models.conftest import tiny_model
from tests.spec_decode.harness import make_runner, many_prompts, run

SIZES = {"hidden_size": 64, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 101}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "checkpoint"
    tiny_model("llama", **SIZES).save_pretrained(folder)
    return folder


@pytest.fixture
def head(model: Path, tmp_path: Path) -> Path:
    """A random head, which drafts from a third of the vocabulary."""
    target = load_model(model, dtype=torch.float32)
    torch.manual_seed(1)
    made = EagleHead(target.config, torch.randperm(101)[:33], torch.float32)
    with torch.no_grad():
        for _, tensor in made.named_tensors():  # memory that nobody has filled yet
            tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, 0.3)
    made.save(tmp_path / "head")
    return tmp_path / "head"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compiled"


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Instead of the compiler one that notes where it was asked to compile to."""
    asked: list[Path] = []

    def compile_parts(parts: Iterator[object], folder: Path, say: object) -> None:
        asked.append(folder)

    monkeypatch.setattr(eagle_compiled, "compile_parts", compile_parts)
    monkeypatch.setattr(eagle_compiled, "_compare", lambda *arguments: None)
    monkeypatch.setattr(CompiledHead, "__init__", lambda self, folder: None)
    return asked


# ---------------------------------------------------------------- what it computes


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_it_drafts_what_the_eager_head_drafts(model: Path, head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(aot, "INDUCTOR", {**aot.INDUCTOR, "freezing": False, "max_autotune": False})
    compile_head(model, head, torch.float32)  # compares with the eager one before it returns
    seen: list[list[list[int]]] = []
    propose = EagleDrafter.propose

    def spy(self: EagleDrafter, progress: Progress) -> list[list[int]]:
        seen.append(propose(self, progress))
        return seen[-1]

    monkeypatch.setattr(EagleDrafter, "propose", spy)
    settings = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    drafted = []
    for use_compiled in (False, True):
        runner = make_runner(model, load_format="auto", attention_backend="cpu", speculative_config=settings)
        if use_compiled:
            runner.speculation.drafter.passes = load_compiled_head(model, head, torch.float32)
            assert runner.speculation.drafter.passes is not None
        seen.clear()
        run(runner, many_prompts(), stagger=2)
        drafted.append([*seen])
    assert sum(map(len, drafted[0])) > 50
    assert drafted[0] == drafted[1]


@pytest.mark.parametrize("computed", [1.0, float("nan")])
def test_a_head_that_computes_something_else_is_not_kept(
    model: Path, head: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, computed: float
) -> None:
    class Wrong:
        def __init__(self, folder: Path) -> None: ...

        def __call__(self, embeds: torch.Tensor, *arguments: object) -> torch.Tensor:
            return embeds

        def logits(self, predicted: torch.Tensor) -> torch.Tensor:
            return torch.full((len(predicted), 33), computed)

    monkeypatch.setattr(eagle_compiled, "compile_parts", lambda *arguments: None)
    monkeypatch.setattr(eagle_compiled, "CompiledHead", Wrong)
    with pytest.raises(ValueError, match="does not compute what the eager one does"):
        compile_head(model, head, torch.float32)
    assert list(cache.iterdir()) == []


# ---------------------------------------------------------------- who finds it


def test_the_engine_drafts_with_it_where_the_decoder_is_compiled(
    model: Path, head: Path, monkeypatch: pytest.MonkeyPatch, no_compiler: list[Path]
) -> None:
    from minivllm.worker import model_runner

    compile_head(model, head, torch.float32)
    settings = {"method": "eagle", "model": str(head), "num_speculative_tokens": 2}
    use = {"load_format": "auto", "attention_backend": "cpu", "speculative_config": settings}
    assert not isinstance(make_runner(model, **use).speculation.drafter.passes, CompiledHead)
    monkeypatch.setattr(model_runner, "CompiledDecoder", object)  # as if the decoder that was loaded were one
    assert isinstance(make_runner(model, **use).speculation.drafter.passes, CompiledHead)


def test_it_is_made_once_and_anew_for_other_weights(model: Path, head: Path, no_compiler: list[Path]) -> None:
    first = compile_head(model, head, torch.float32)
    assert compile_head(model, head, torch.float32) == first
    assert load_compiled_head(model, head, torch.bfloat16) is None
    os.utime(head / "model.safetensors", ns=(0, 0))
    assert load_compiled_head(model, head, torch.float32) is None
    assert compile_head(model, head, torch.float32) != first
    assert not first.exists()
    assert len(no_compiler) == 2


def test_two_heads_of_a_target_and_its_decoder_are_kept_side_by_side(
    model: Path, head: Path, tmp_path: Path, no_compiler: list[Path]
) -> None:
    other = shutil.copytree(head, tmp_path / "other")
    first = compile_head(model, head, torch.float32)
    second = compile_head(model, other, torch.float32)
    decoder = compile_cache.make(
        *compile_cache._label_and_key(model, torch.float32, None), lambda line: None, lambda folder: None
    )
    quantized = compile_cache.make(
        *compile_cache._label_and_key(model, torch.float32, "int4"), lambda line: None, lambda folder: None
    )
    os.utime(model / "config.json", ns=(0, 0))  # a checkpoint of another time: each of the four is stale, none is another's
    label, key = compile_cache._label_and_key(model, torch.float32, None)
    assert [Path(old["folder"]) for old in compile_cache._others(label, key)] == [decoder]
    assert compile_cache.why_not(label, key) == "it is compiled for another checkpoint"
    assert len({first, second, decoder, quantized}) == 4
    assert all(folder.exists() for folder in (first, second, decoder))


def test_a_folder_of_before_there_were_heads_is_a_decoders(model: Path) -> None:
    label, key = compile_cache._label_and_key(model, torch.float32, None)
    old = {name: value for name, value in key.items() if name != "what"} | {"version of minivllm": "old"}
    folder = compile_cache.make(label, old, lambda line: None, lambda folder: None)
    assert compile_cache.why_not(label, key) == "it is compiled for another version of minivllm"
    compile_cache.make(label, key, lambda line: None, lambda folder: None)
    assert not folder.exists()


def test_other_code_of_the_head_makes_it_stale(model: Path, head: Path) -> None:
    _, key = eagle_compiled._label_and_key(model, head, torch.float32)
    decoders = compile_cache._label_and_key(model, torch.float32, None)[1]
    assert key["version of minivllm"] != decoders["version of minivllm"]


def test_without_it_a_line_says_how_to_get_it(model: Path, head: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "minivllm"):
        assert load_compiled_head(model, head, torch.float32) is None
        assert load_compiled_head(model, eagle.SHIPPED, torch.float32) is None
    own, shipped = (record.message for record in caplog.records)
    assert own.endswith(f"minivllm compile {model} --dtype float32 --eagle-head {head}")
    assert shipped.endswith(f"minivllm compile {model} --dtype float32")


def test_a_broken_one_is_no_reason_to_stop(
    model: Path, head: Path, no_compiler: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = compile_head(model, head, torch.float32)
    monkeypatch.undo()
    monkeypatch.setenv("MINIVLLM_CACHE", str(folder.parent.parent))
    with caplog.at_level(logging.WARNING, "minivllm"):
        assert load_compiled_head(model, head, torch.float32) is None  # a folder without a library in it
    assert str(folder) in caplog.records[0].message
    assert "weights.json" in caplog.records[0].message
    for index, word in (('{"files": ["head.json"], "tensors": []}', "head.json is missing"), ("[]", "eager"), ("{}", "eager")):
        (folder / "weights.json").write_text(index)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "minivllm"):
            assert load_compiled_head(model, head, torch.float32) is None
        assert word in caplog.records[0].message


# ---------------------------------------------------------------- minivllm compile


def test_the_command_compiles_the_head_it_is_given(
    model: Path, head: Path, no_compiler: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from minivllm.models import compiled

    monkeypatch.setattr(compiled, "compile_decoder", lambda decoder, folder, say: None)
    assert cli.main(["compile", str(model), "--dtype", "float32", "--eagle-head", str(head)]) == 0
    assert len(no_compiler) == 1
    assert cli.main(["compile", str(model), "--dtype", "float32"]) == 0  # none ships for a model of these sizes
    assert len(no_compiler) == 1
    assert capsys.readouterr().out.splitlines()[-1] == str(compile_cache.compile_model(model, torch.float32))


def test_a_folder_without_a_head_is_told_before_anything_is_made(
    model: Path, tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compile", str(model), "--dtype", "float32", "--eagle-head", str(tmp_path)]) != 0
    assert "holds no EAGLE head" in capsys.readouterr().err
    assert not cache.exists()


def test_a_folder_without_a_head_is_told_by_the_engine_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minivllm.worker import model_runner

    settings = {"method": "eagle", "model": str(tmp_path / "nowhere"), "num_speculative_tokens": 2}
    monkeypatch.setattr(model_runner, "CompiledDecoder", object)
    with pytest.raises(ValueError, match="holds no EAGLE head"):
        make_runner(model, load_format="auto", attention_backend="cpu", speculative_config=settings)


def test_the_head_that_ships_is_for_smollm2_only(model: Path) -> None:
    from minivllm.models.registry import ModelConfig
    from minivllm.models.weights import load_config

    config = load_config("smollm2-135m", load_format="dummy")
    assert eagle.shipped_head(config) == eagle.SHIPPED
    assert eagle.shipped_head(replace(config, intermediate_size=1024)) is None
    assert eagle.shipped_head(ModelConfig.from_folder(model)) is None
