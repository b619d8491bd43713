"""Compiled modules on this disk: made once, found again only by those they were made for. `compiled.py` makes and loads the
decoder, `spec_decode/eagle_compiled.py` an EAGLE head.

    <cache>/compiled/smollm2-135m-bfloat16-4f1c.../     finished: it appears by one rename, so what is there is whole
    <cache>/compiled/.tmp-smollm2-135m-bfloat16@x/      being made, under the lock; a killed process's is removed by the next
    <cache>/locks/compiled-smollm2-135m-bfloat16.lock   held while it is made; the system frees it when the process dies

Its machine code is made for one processor, one number of threads, one torch and one version of our own source; its weights are
those of one checkpoint. All of that is its *key*. Nobody finds a folder by another key: a stale one is as good as none.

Labs: built by none. May not know what is compiled, or how.
"""

from __future__ import annotations

import ast
import errno
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minivllm.models.hub import cache_dir, resolve_model
from minivllm.models.registry import ModelConfig

if TYPE_CHECKING:
    from minivllm.attention.interface import AttentionBackend
    from minivllm.models.compiled import CompiledDecoder

logger = logging.getLogger("minivllm")

SOURCES = tuple(Path(__file__).with_name(f"{name}.py") for name in ("aot", "compiled", "decoder", "layers", "linear", "rope"))
_LEAST_ROOM = 1 << 20  # bytes that a disk has when it is not full
_ROOM = "Give it room (smollm2-135m takes 0.4 GB), or set the environment variable MINIVLLM_CACHE to a folder that has it"
BROKEN = (OSError, ValueError, RuntimeError, AttributeError, TypeError, LookupError)  # what a bad folder raises
_KEY = "key.json"


def load_compiled(
    model: str | Path, dtype: torch.dtype, backend: AttentionBackend, quantization: str | None = None
) -> CompiledDecoder | None:
    """The compiled decoder of a model for this machine, or None where there is none that fits. One line in the log says which,
    and what to do about it."""
    from minivllm.models.compiled import DTYPES, CompiledDecoder

    if dtype not in DTYPES:
        return None
    name, wanted = _label_and_key(model, dtype, quantization)
    folder = find(name, wanted)
    if folder is None:
        command = f"minivllm compile {model}{_flags(dtype, quantization)}"
        logger.info("%s runs eager: %s. Once, for more speed: %s", model, why_not(name, wanted), command)
        return None
    try:
        return CompiledDecoder(folder, ModelConfig.from_folder(resolve_model(model)), backend)
    except BROKEN as error:
        logger.warning(
            "%s runs eager: its compiled decoder in %s is broken (%s). Delete the folder, then: minivllm compile %s%s",
            model, folder, first_line(error), model, _flags(dtype, quantization),
        )  # fmt: skip
        return None


def compile_model(
    model: str | Path,
    dtype: torch.dtype,
    say: Callable[[str], None] = lambda line: None,
    quantization: str | None = None,
) -> Path:
    """The folder of the compiled decoder of a model, for this machine and process. Made if it is not there: minutes.

    Raises ValueError for a model or machine it cannot be made for, OSError if the cache cannot be written."""
    from minivllm.attention.cpu import cpu_backend
    from minivllm.models.compiled import compile_decoder
    from minivllm.models.int4 import quantize_decoder
    from minivllm.models.weights import load_model

    def fill(folder: Path) -> None:
        say("loading the weights")
        decoder = load_model(resolve_model(model), dtype=dtype)
        decoder.attention_backend = cpu_backend(dtype)
        if quantization == "int4":
            quantize_decoder(decoder, keep_unpacked=True)
        compile_decoder(decoder, folder, say)

    return make(*_label_and_key(model, dtype, quantization), say, fill)


# ---------------------------------------------------------------- any compiled module


def find(label: str, key: dict[str, Any]) -> Path | None:
    """The finished folder, if there is one of just this key."""
    folder = _folder(label, key)
    return folder if folder.is_dir() else None


def why_not(label: str, key: dict[str, Any]) -> str:
    """Why there is none of this key, for a line of the log."""
    stale = next((_difference(old, key) for old in _others(label, key)), None)
    return "it is not compiled" if stale is None else f"it is compiled for another {stale}"


def make(label: str, key: dict[str, Any], say: Callable[[str], None], fill: Callable[[Path], None]) -> Path:
    """The folder of a key. If it is not there, `fill` makes it from an empty one, one process at a time; the others wait."""
    target = _folder(label, key)
    if target.is_dir():
        return target
    with _locked(label, say):
        if target.is_dir():  # made while this process waited
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in target.parent.glob(f".tmp-{label}@*"):  # under the lock no one else's is alive
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{label}@", dir=target.parent))
        try:
            fill(temporary)
            (temporary / _KEY).write_text(json.dumps(key, indent=2) + "\n", encoding="utf-8")
            temporary.chmod(0o755)
            temporary.rename(target)
        except Exception as error:
            if _is_full(temporary, error):  # the compiler says it in words of its own
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}. {_ROOM}", str(target.parent)) from error
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        for old in _others(label, key):
            if _difference(old, key) in ("checkpoint", "head's files", "version of minivllm"):  # nobody can use it any more
                shutil.rmtree(old["folder"], ignore_errors=True)
    return target


def _is_full(folder: Path, error: Exception) -> bool:
    """Whether it was for want of room that the folder was not finished."""
    says_so = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return says_so or shutil.disk_usage(folder).free < _LEAST_ROOM


def make_label(model: str | Path, dtype: torch.dtype, what: str | None) -> str:
    """The part of a folder's name for people."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).name).strip(".-") or "model"
    return "-".join([name, str(dtype).removeprefix("torch."), *([what] if what else [])])


def make_key(source: Path, dtype: torch.dtype, code: Sequence[Path], what: dict[str, str | None]) -> dict[str, Any]:
    """What must be the same, in words of the log's line. code: the source files the result depends on.   what: of the
    checkpoint in `source` is compiled."""
    import minivllm.attention.cpu  # noqa: F401 (defines the operator)

    operator = str(torch.ops.minivllm.cpu_attention.default._schema)  # what the library calls by name
    return {
        "model": str(source.resolve()),
        "dtype": str(dtype),
        **what,
        "checkpoint": digest_of_files([*source.glob("*.safetensors"), source / "config.json"]),
        "version of minivllm": _digest(("".join(map(_code, code)) + operator).encode()),
        "torch": torch.__version__,
        "number of threads": torch.get_num_threads(),
        "processor": _processor(),
    }


def digest_of_files(paths: Sequence[Path]) -> str:
    """Of their names, sizes and times: contents would take longer to read than the model to load."""
    return _digest(repr([(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(paths)]).encode())


def first_line(error: BaseException) -> str:
    """What an error says, for a line of the log."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _label_and_key(model: str | Path, dtype: torch.dtype, quantization: str | None) -> tuple[str, dict[str, Any]]:
    """Of a model's decoder."""
    code = SOURCES if quantization is None else (*SOURCES, Path(__file__).with_name(f"{quantization}.py"))
    what = {"what": "decoder", "quantization": quantization}
    return make_label(model, dtype, quantization), make_key(resolve_model(model), dtype, code, what)


def _code(path: Path) -> str:
    """A source file without its docstrings and comments: better words are no reason to compile again."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.unparse(tree)


def _processor() -> str:
    """Its name and a digest of what it can do: a name alone may hide that a virtual machine takes features away."""
    name, features = platform.processor() or platform.machine(), torch.backends.cpu.get_cpu_capability()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return f"{name} {features}"
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    features += " ".join(sorted(found.get("flags", found.get("Features", "")).split()))
    return f"{found.get('model name', name)} {_digest(features.encode())}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _folder(label: str, key: dict[str, Any]) -> Path:
    return cache_dir() / "compiled" / f"{label}-{_digest(json.dumps(key, sort_keys=True).encode())}"


def _others(label: str, key: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The keys of the model's folders made for others, with the `folder` in each."""
    for folder in sorted((cache_dir() / "compiled").glob(f"{label}-*")):
        try:
            old = json.loads((folder / _KEY).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        old.setdefault("what", "decoder")  # folders of before there were others
        same = all(old.get(name) == key.get(name) for name in ("model", "what", "quantization", "head"))
        if same and folder != _folder(label, key):
            yield old | {"folder": folder}


def _difference(old: dict[str, Any], key: dict[str, Any]) -> str:
    return next((name for name in key if old.get(name) != key[name]), "key")


def _flags(dtype: torch.dtype, quantization: str | None) -> str:
    return f" --dtype {str(dtype).removeprefix('torch.')}" + (f" --quantization {quantization}" if quantization else "")


def _locked(label: str, say: Callable[[str], None]) -> Any:
    from filelock import FileLock, Timeout

    path = cache_dir() / "locks" / f"compiled-{label}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting: another process is compiling {label}")
        return lock.acquire()
