"""Who may know whom. A room that may not know torch is imported in a process of its own, and torch must not be there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "minivllm"
NOTEBOOK_PACKAGES = {"IPython", "ipywidgets", "matplotlib", "nbformat", "nbclient", "jupytext", "nbval", "checks"}
KERNELS = {"numba_kernels.py", "numba_tiles.py", "triton_kernels.py"}
PICTURES = {
    "observe/timeline.py": {"matplotlib"},
    "observe/widgets.py": {"ipywidgets"},
    "spec_decode/train_eagle.py": {"matplotlib"},
    "bench/serve.py": {"matplotlib"},
    "bench/compare.py": {"matplotlib"},
}  # where they are used, and so named
SERVER_PACKAGES = {"fastapi", "starlette", "pydantic", "uvicorn", "zmq", "prometheus_client"}
ON_USE_ONLY = {"gguf", "msgspec", "numba", "triton", "transformers", "huggingface_hub"} | NOTEBOOK_PACKAGES


def modules_of(*rooms: str) -> list[str]:
    files = [p for room in rooms for p in sorted((PACKAGE / room).glob("*.py"))]
    return [str(p.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__init__") for p in files]


def modules_loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["minivllm", "minivllm.cli", "minivllm.config", *modules_of("core", "text", "observe", "serving")]
)
def test_is_imported_without_torch(module: str):
    if module.startswith("minivllm.serving"):
        pytest.importorskip("fastapi")
    loaded = modules_loaded_by(f"import {module}")
    assert "torch" not in loaded
    assert "transformers" not in loaded


def test_importing_the_package_loads_nothing_but_itself():
    loaded = modules_loaded_by("import minivllm")
    assert not {"numpy", "tokenizers", "jinja2", "asyncio"} & loaded
    assert {m for m in loaded if m.startswith("minivllm")} == {"minivllm"}


def top_level_modules(path: Path) -> set[str]:
    """Names of modules imported when the module is imported (not inside functions, not for type checkers)."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def top_level_imports(path: Path) -> set[str]:
    return {name.split(".")[0] for name in top_level_modules(path)}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_may_be_missing_is_imported_where_it_is_used(path: Path):
    if path.name in KERNELS:  # themselves imported where they are used, and nowhere else
        for other in PACKAGE.rglob("*.py"):
            assert other.name in KERNELS or path.stem not in " ".join(top_level_modules(other))
        return
    if path.parent.name == "serving":  # the room itself is imported where it is used; of it one file knows msgspec
        assert not top_level_imports(path) & ON_USE_ONLY - ({"msgspec"} if path.name == "wire.py" else set())
        return
    assert not top_level_imports(path) & (ON_USE_ONLY | SERVER_PACKAGES)
    assert not [name for name in top_level_modules(path) if name.startswith("minivllm.serving")]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_engine_never_imports_the_course(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            allowed = PICTURES.get(str(path.relative_to(PACKAGE)), set())
            assert not {n.split(".")[0] for n in names} & NOTEBOOK_PACKAGES - allowed


ROOMS_A_ROOM_MAY_IMPORT = {
    "core": {"core", "config", "sampling_params", "components"},
    "observe": {"observe", "core", "config", "components", "bench"},  # of bench: metrics.py, which knows traces alone
    "text": {"text"},
    "attention": {"attention", "components"},
    "models": {"models", "attention"},
    "sampling": {"sampling", "core", "sampling_params"},
    "worker": {"worker", "core", "models", "attention", "sampling", "spec_decode", "config", "components", "sampling_params"},
    "spec_decode": {"spec_decode", "models", "attention"},
    "serving": {
        "serving",
        "core",
        "text",
        "config",
        "sampling_params",
        "components",
        "input_processor",
        "output_processor",
        "outputs",
        "generation_config",
        "llm",
        "sim",
        "worker",  # of sim: the echo model; of worker: the runner, in the core's process
    },
    "sim": {"sim", "core", "models", "config", "sampling_params"},
}


LABS_ONLY = {"contiguous.py"}  # runs a decoder over a cache without blocks; the engine never imports it
PROGRAMS = {"train_eagle.py"}  # run by themselves, on top of everything


def imports_at_run_time(path: Path) -> list[ast.ImportFrom]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {id(n) for block in for_types for n in ast.walk(block)}
    return [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and id(n) not in skipped]


@pytest.mark.parametrize("room", ROOMS_A_ROOM_MAY_IMPORT)
def test_rooms_know_only_the_rooms_below_them(room: str):
    for path in (PACKAGE / room).glob("*.py"):
        if path.name in LABS_ONLY | PROGRAMS:
            continue
        for node in imports_at_run_time(path):
            if (node.module or "").startswith("minivllm."):
                other = (node.module or "").split(".")[1]
                assert other in ROOMS_A_ROOM_MAY_IMPORT[room], f"{path.name} imports minivllm.{other}"
