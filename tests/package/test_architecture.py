"""The shape of the package: no cycles, every public thing explained, every tensor's shape said, and no change of the public API
unnoticed. (Which room may know which: test_imports.py.)"""

from __future__ import annotations

import ast
import dataclasses
import graphlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "minivllm"
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in FILES}
SNAPSHOT = Path(__file__).with_name("public_api.txt")
# Backends implement attention/interface.py, which says the shapes once.
OF_THE_INTERFACE = {"write_kv", "decode", "prefill", "paged_decode", "paged_prefill"}


def by_path(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported_on_import(module: str) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(MODULES[module].read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minivllm"):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (inner & set(MODULES)) or {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & set(MODULES)
    return found


def test_no_module_needs_itself_to_be_imported() -> None:
    graph = {module: imported_on_import(module) for module in MODULES}
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, naming the cycle


TELLS_THE_DATE = {"serving/responses.py", "text/sandbox.py"}  # "created" of an answer; a template's strftime_now


@pytest.mark.parametrize("path", [p for p in FILES if by_path(p) not in TELLS_THE_DATE], ids=by_path)
def test_no_duration_is_taken_from_a_clock_that_can_be_set(path: Path) -> None:
    """time.time() jumps when somebody sets the clock: arrival, latency and deadlines are of time.monotonic or perf_counter."""
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)}
    assert not called & {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}


SCREEN = 55  # lines, without the docstring
LONGER = {  # kernels, which are one loop; lists of parameters and flags; tables of cases and of what mistakes are told
    "minivllm/attention/numba_kernels.py:paged_decode_kernel",
    "minivllm/attention/numba_kernels.py:paged_decode_kernel.kernel",
    "minivllm/cli.py:_parser",
    "minivllm/sampling_params.py:SamplingParams.__init__",
    "checks/exercises/lab_06.py:_why_tokens",
    "checks/exercises/lab_10_reject.py:_given_cases",
}


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Each by its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = f"{within}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, within)


def test_a_function_fits_a_screen() -> None:
    """All but those listed, and those need it."""
    longer = set()
    for path in (*FILES, *sorted((ROOT / "checks").rglob("*.py"))):
        for name, node in functions(ast.parse(path.read_text(encoding="utf-8"))):
            length = (node.end_lineno or 0) - node.lineno + 1 - len((ast.get_docstring(node, False) or "").splitlines())
            if length > SCREEN:
                longer.add(f"{path.relative_to(ROOT).as_posix()}:{name}")
    assert longer == LONGER


Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def public_things(tree: ast.Module) -> Iterator[tuple[str, Documented, ast.ClassDef | None]]:
    for node in tree.body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield node.name, node, None
            for inner in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(inner, Documented) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner, node


@pytest.mark.parametrize("path", [p for p in FILES if p.stat().st_size], ids=by_path)
def test_every_module_and_public_class_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree), "a file says what its subject is, and what it may not know"
    bare = [name for name, node, _ in public_things(tree) if isinstance(node, ast.ClassDef) and not ast.get_docstring(node)]
    assert not bare, f"no docstring: {', '.join(bare)}"


@pytest.mark.parametrize("path", FILES, ids=by_path)
def test_every_public_function_of_tensors_says_their_shapes(path: Path) -> None:
    """In its own docstring, its class's or its file's; "[" is where a shape begins."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name, node, owner in public_things(tree):
        if isinstance(node, ast.ClassDef) or node.name.removeprefix("naive_") in OF_THE_INTERFACE:
            continue
        takes = ast.unparse(node.args)
        told = "".join(ast.get_docstring(place) or "" for place in (node, owner, tree) if place is not None)
        assert "[" in told or not ("torch.Tensor" in takes or "np.ndarray" in takes), f"{name}({takes}) says no shape"


# ---------------------------------------------------------------------- the public API


def described(name: str, thing: object) -> Iterator[str]:
    if not inspect.isclass(thing):
        yield f"{name}{inspect.signature(thing)}" if callable(thing) else f"{name}: {type(thing).__name__}"
        return
    yield f"{name}{inspect.signature(thing)}"
    if dataclasses.is_dataclass(thing):
        yield from (f"{name}.{field.name}: {field.type}" for field in dataclasses.fields(thing))
    for member, value in sorted(vars(thing).items()):
        if member.startswith("_"):
            continue
        if isinstance(value, property):
            yield f"{name}.{member}: property"
        elif callable(getattr(thing, member)):
            yield f"{name}.{member}{inspect.signature(getattr(thing, member))}"


def public_api() -> str:
    import minivllm
    from minivllm.components import SEAMS
    from minivllm.serving.async_llm import AsyncLLM
    from minivllm.text.tokenizer import Tokenizer

    things = {name: getattr(minivllm, name) for name in sorted(minivllm.__all__)}
    lines = [line for name, thing in things.items() for line in described(name, thing)]
    for extra in (AsyncLLM, Tokenizer):
        lines += described(extra.__name__, extra)
    lines += [f"seam {name}: {seam.file} {seam.attribute}" for name, seam in SEAMS.items()]
    return "\n".join(lines) + "\n"


def test_the_public_api_is_the_one_that_was_written_down() -> None:
    """A change here breaks somebody's script. If it is meant: python -m tests.package.test_architecture, and a line in
    CHANGELOG.md."""
    pytest.importorskip("msgspec")
    now, noted = public_api().splitlines(), SNAPSHOT.read_text(encoding="utf-8").splitlines()
    gone, new = [line for line in noted if line not in now], [line for line in now if line not in noted]
    assert not gone and not new, "\n".join(["The public API changed:", *(f"- {x}" for x in gone), *(f"+ {x}" for x in new)])


if __name__ == "__main__":
    SNAPSHOT.write_text(public_api(), encoding="utf-8")
