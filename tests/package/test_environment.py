"""The ways to install say the same, and the wheel holds the engine alone."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONDA_NAMES = {"pytorch": "torch"}


def split(requirement: str) -> tuple[str, str]:
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return name.group().lower(), requirement[name.end() :].strip()


def pyproject() -> dict:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        tomllib = pytest.importorskip("tomli")
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_environment_yml_asks_for_exactly_what_pyproject_asks_for():
    yaml = pytest.importorskip("yaml")
    project = pyproject()["project"]
    wanted = list(project["dependencies"]) + [r for extra in project["optional-dependencies"].values() for r in extra]
    wanted = {split(r) for r in wanted if not r.startswith("minivllm[")}
    conda = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    pip = next(entry["pip"] for entry in conda if isinstance(entry, dict))
    listed = [entry for entry in conda if isinstance(entry, str)] + [r for r in pip if r != "-e ."]
    found = {split(r) for r in listed} - {("pip", "")}
    found = {(CONDA_NAMES.get(name, name), rest) for name, rest in found}
    assert ("python", project["requires-python"]) in found
    assert found - {("python", project["requires-python"])} == wanted


def test_the_extra_named_all_is_all():
    extras = pyproject()["project"]["optional-dependencies"]
    named = set(re.findall(r"[a-z]+", extras["all"][0].split("[")[1]))
    assert named == set(extras) - {"all"}


def test_triton_is_asked_for_on_linux_only():
    extras = pyproject()["project"]["optional-dependencies"]
    triton = [r for extra in extras.values() for r in extra if r.startswith("triton")]
    assert triton and all("platform_system == 'Linux'" in r for r in triton)


@pytest.mark.slow
def test_the_wheel_holds_the_engine_and_nothing_else(tmp_path: Path):
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"minivllm"}


def test_no_file_names_a_path_of_the_machine_it_was_written_on():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    bad = re.compile(r"/(root|home/[a-z]+|Users/[A-Za-z]+|work)/[\w.]")
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".py", ".md", ".toml", ".yml", ".yaml", ".ipynb", ".json", ""} and path.is_file():
            for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                assert name == "tests/package/test_environment.py" or not bad.search(line), f"{name}:{number}: {line[:120]}"
