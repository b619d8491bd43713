"""Hidden tests stay hidden: whatever a student's code prints, raises, returns or leaves behind, no file that is handed back
has a hidden input or an expected value in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checks.exercises import find
from checks.grading.isolation import has_namespaces
from checks.grading.points import hidden_cases, public_cases
from checks.grading.run import run
from tests.grading import mangled
from tests.grading.conftest import SECRET, options, shortened

MARK = "LEAKED"
# Right for the cases everybody has; with any other it tells what it was given.
ONLY_WHEN_HIDDEN = """
PUBLIC = {public!r}

def told(positions, block_table, block_size):
    return "LEAKED " + repr((positions.tolist(), block_table.tolist(), block_size))

def good(positions, block_table, block_size):
    entries, rows = np.divmod(positions, block_size)
    return np.take(block_table, entries) * block_size + rows

def is_public(positions, block_table, block_size):
    return repr((positions.tolist(), block_table.tolist(), block_size)) in PUBLIC
"""
WAYS = {
    "raises": "raise ValueError(told(*args))",
    "raises_itself": "raise type(told(*args).replace(' ', '_'), (Exception,), {})()",
    "prints": "print(told(*args)); return good(*args)",
    "prints_and_is_wrong": "print(told(*args)); return positions",
    "writes_stderr": "import sys; sys.stderr.write(told(*args)); return positions",
    "returns_text": "return told(*args)",
    "returns_keys": "return {told(*args): 1}",
    "names_a_type": "return type(told(*args), (), {})()",
    "exits": "import os, sys; sys.stdout.write(told(*args)); sys.stdout.flush(); os._exit(3)",
    "exit_text": "raise SystemExit(told(*args))",
    "missing_name": "raise NameError(told(*args), name=told(*args))",
    "missing_module": "raise ModuleNotFoundError(told(*args), name=told(*args))",
    "warns": "import warnings; warnings.warn(told(*args)); return positions",
    "writes_files": (
        "open('/tmp/' + MARK, 'w').write(told(*args)); open(__import__('os').path.expanduser('~/x'), 'w').write(told(*args))"
        "\n    return positions"
    ),
    "loops": "print(told(*args), flush=True)\n    while True: pass",
    "frames": (
        "import sys\n    frame = sys._getframe()\n    while frame.f_back: frame = frame.f_back\n"
        "    raise ValueError('LEAKED ' + repr(frame.f_locals))"
    ),
}


def source(way: str) -> str:
    public = {repr((c["positions"], c["block_table"], c["block_size"])) for c in public_cases(find("4.3"))}
    head = ONLY_WHEN_HIDDEN.format(public=public) + f"\nMARK = {MARK!r}\n"
    body = f"args = positions, block_table, block_size\nif is_public(*args): return good(*args)\nif True:\n    {WAYS[way]}"
    return mangled.function(body, head)


# Exercise 4.4 is checked after 4.3: it tells what 4.3's hidden run left behind.
LOOKS_AROUND = """
import glob, os

def write_kv(key, value, kv_cache, slot_mapping):
    found = [open(f).read() for d in ("/tmp", os.path.expanduser("~"), ".") for f in glob.glob(d + "/*") if os.path.isfile(f)]
    raise ValueError("found: " + " ".join(found)[:500])
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leaks")
    for way in WAYS:
        (folder / "in" / way).mkdir(parents=True)
        raw = mangled.lab({"4.3": source(way), **({"4.4": LOOKS_AROUND} if has_namespaces() else {})})
        (folder / "in" / way / "04_paged_kv.ipynb").write_text(json.dumps(raw), encoding="utf-8")
    with shortened():
        run(options(folder / "in", folder / "out"), say=lambda _: None)
    return folder / "out"


def handed_on(out: Path) -> dict[str, str]:
    return {
        str(path.relative_to(out)): path.read_text(encoding="utf-8")
        for path in sorted(out.rglob("*"))
        if path.is_file() and ".run" not in path.parts
    }


def test_nothing_a_hidden_run_said_is_in_any_file(out: Path) -> None:
    files = handed_on(out)
    assert len(files) > len(WAYS)
    assert not [name for name, text in files.items() if MARK in text]


def test_no_hidden_input_and_no_expected_value_is_in_any_file(out: Path) -> None:
    files = handed_on(out)
    cases = hidden_cases(find("4.3"), SECRET)
    assert cases
    for case in cases:
        size, table = case["block_size"], case["block_table"]
        slots = [table[p // size] * size + p % size for p in case["positions"]]
        for numbers in (table[:4], slots[:4]):
            assert not [name for name, text in files.items() if str(numbers)[1:-1] in text]


def test_every_way_fails_the_hidden_tests_with_a_fixed_word(out: Path) -> None:
    for path in (out / ".state").glob("*-04-*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        result = next(r for r in record["exercises"] if r["exercise"] == "4.3")
        passed = record["student"] == "prints"
        assert result["points"] == (1.0 if passed else 0.5)
        assert result["message"] == "" and (passed or result["hidden"].startswith("hidden tests: "))


def test_the_secret_is_nowhere_in_what_is_handed_on(out: Path) -> None:
    assert not [name for name, text in handed_on(out).items() if SECRET in text]
