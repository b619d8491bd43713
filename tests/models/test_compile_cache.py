"""Where compiled decoders are kept: found by what they were made for, made once, and never in the engine's way."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
from pathlib import Path

import pytest
import torch

from minivllm import cli
from minivllm.attention import get_backend
from minivllm.models import compile_cache, compiled
from minivllm.models.compile_cache import _code, compile_model, load_compiled
from tests.models.conftest import MakeModel

BACKEND = get_backend("reference", "cpu", torch.float32)


@pytest.fixture
def folder(make_model: MakeModel) -> Path:
    return make_model("llama")[0]


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """A cache of its own, and instead of the compiler one that notes where it was asked to compile to."""
    asked: list[Path] = []

    def compile_decoder(decoder, target: Path, say) -> None:
        asked.append(target)
        (target / "weights.json").write_text("[]")

    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "compile_decoder", compile_decoder)
    monkeypatch.setattr(compiled.CompiledDecoder, "__init__", lambda self, folder, config, backend: None)
    return asked


def said(caplog: pytest.LogCaptureFixture) -> str:
    lines = [record.message for record in caplog.records if "eager" in record.message]
    assert len(lines) == 1
    return lines[0]


def test_what_is_compiled_is_found_again_and_not_made_twice(folder: Path, made: list[Path]) -> None:
    first = compile_model(folder, torch.float32)
    assert compile_model(folder, torch.float32) == first
    assert len(made) == 1
    assert [path.name for path in first.parent.iterdir()] == [first.name]  # nothing temporary is left
    assert load_compiled(folder, torch.float32, BACKEND) is not None


def test_without_one_a_line_says_how_to_get_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "minivllm"):
        assert load_compiled(folder, torch.float32, BACKEND) is None
    assert said(caplog).endswith(f"minivllm compile {folder} --dtype float32")


def test_another_dtype_is_another_one(folder: Path) -> None:
    compile_model(folder, torch.float32)
    assert load_compiled(folder, torch.bfloat16, BACKEND) is None


def test_other_weights_make_it_stale_and_compiling_again_replaces_it(
    folder: Path, made: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    stale = compile_model(folder, torch.float32)
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, 0))
    with caplog.at_level(logging.INFO, "minivllm"):
        assert load_compiled(folder, torch.float32, BACKEND) is None
    assert "compiled for another checkpoint" in said(caplog)
    assert compile_model(folder, torch.float32) != stale
    assert not stale.exists()
    assert len(made) == 2


def test_another_number_of_threads_keeps_both(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_model(folder, torch.float32)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert load_compiled(folder, torch.float32, BACKEND) is None
    compile_model(folder, torch.float32)
    assert first.exists()


def test_a_broken_one_is_no_reason_to_stop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = compile_model(folder, torch.float32)

    def fail(self, *arguments: object) -> None:
        raise OSError("invalid ELF header")

    monkeypatch.setattr(compiled.CompiledDecoder, "__init__", fail)
    with caplog.at_level(logging.INFO, "minivllm"):
        assert load_compiled(folder, torch.float32, BACKEND) is None
    assert "invalid ELF header" in said(caplog)
    assert str(target) in said(caplog)


def test_a_compilation_that_fails_or_is_killed_leaves_nothing_to_find(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(decoder, target: Path, say) -> None:
        raise ValueError("no compiler")

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="no compiler"):
        patch.setattr(compiled, "compile_decoder", fail)
        compile_model(folder, torch.float32)
    cache = compile_cache.cache_dir() / "compiled"
    assert list(cache.iterdir()) == []
    (cache / ".tmp-checkpoint-float32@killed").mkdir()
    target = compile_model(folder, torch.float32)
    assert list(cache.iterdir()) == [target]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("the compiler ended with 1")])
def test_a_disk_that_fills_up_while_compiling_is_named_with_the_way_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fill_up(decoder, target: Path, say) -> None:
        if isinstance(error, ValueError):  # a compiler, that has words of its own for it
            usage = compile_cache.shutil.disk_usage(target)._replace(free=0)
            monkeypatch.setattr(compile_cache.shutil, "disk_usage", lambda path: usage)
        raise error

    monkeypatch.setattr(compiled, "compile_decoder", fill_up)
    with pytest.raises(OSError, match=r"No space left on device.* MINIVLLM_CACHE") as caught:
        compile_model(folder, torch.float32)
    cache = compile_cache.cache_dir() / "compiled"
    assert (caught.value.errno, caught.value.filename, list(cache.iterdir())) == (errno.ENOSPC, str(cache), [])


def test_of_two_at_once_one_compiles_and_the_other_waits_for_it(
    folder: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, go_on, lines = threading.Event(), threading.Event(), []
    fast = compiled.compile_decoder

    def slow(decoder, target: Path, say) -> None:
        at_work.set()
        go_on.wait(10)
        fast(decoder, target, say)

    def say(line: str) -> None:
        lines.append(line)
        if "another process" in line:
            go_on.set()

    monkeypatch.setattr(compiled, "compile_decoder", slow)
    thread = threading.Thread(target=compile_model, args=(folder, torch.float32))
    thread.start()
    at_work.wait(10)
    target = compile_model(folder, torch.float32, say)
    thread.join()
    assert len(made) == 1
    assert json.loads((target / "key.json").read_text())["dtype"] == "torch.float32"


def test_int4_is_kept_beside_the_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minivllm.models.int4.quantize_decoder", lambda decoder, keep_unpacked: None)
    plain = compile_model(folder, torch.float32)
    assert load_compiled(folder, torch.float32, BACKEND, "int4") is None
    quantized = compile_model(folder, torch.float32, quantization="int4")
    os.utime(folder / "model.safetensors", ns=(0, 0))
    compile_model(folder, torch.float32)
    assert quantized.exists()
    assert not plain.exists()


def test_the_command_says_what_it_does_and_ends_with_the_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compile", str(folder), "--dtype", "float32"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == str(compile_model(folder, torch.float32))
    assert "loading the weights ..." in err


def test_other_words_are_no_reason_to_compile_again_and_other_code_is(tmp_path: Path) -> None:
    texts = (
        '''"""Doc."""\ndef f(x):\n    """Twice x."""\n    return 2 * x  # why\n''',
        '''"""Other."""\ndef f(x):\n    """x, twice."""\n\n    return 2 * x\n''',
        '''"""Doc."""\ndef f(x):\n    """Twice x."""\n    return 3 * x  # why\n''',
    )
    path = tmp_path / "source.py"
    codes = []
    for text in texts:
        path.write_text(text)
        codes.append(_code(path))
    assert codes[0] == codes[1] != codes[2]
