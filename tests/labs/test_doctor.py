"""python -m checks doctor: it starts on a bare Python, names what is missing, and goes on whatever is broken."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checks import doctor
from checks.doctor import NOTE, OK, PROBLEM, Finding, examine, lines_of, older, requirements

ROOT = Path(__file__).resolve().parents[2]


def states(found: Iterator[Finding]) -> dict[str, str]:
    return {finding.what: finding.state for finding in found}


def test_it_runs_where_nothing_is_installed() -> None:
    """-S: no site-packages. The missing packages are findings, and the exit status says so."""
    done = subprocess.run(
        [sys.executable, "-S", "-m", "checks", "doctor"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1 and not done.stderr, done.stderr
    assert "missing: torch; transformers" in " ".join(done.stdout.split())
    assert "Traceback" not in done.stdout and "make lab" in done.stdout


def test_a_healthy_machine_is_ready_and_the_report_fits_80_columns(
    student: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "STEPS", (doctor.python, doctor.memory, doctor.device, doctor.network))
    assert doctor.main() == 0
    shown = capsys.readouterr().out.splitlines()[1:]  # the first names this Python, wherever it is
    assert shown[-1] == "Ready for the labs." and max(map(len, shown)) <= 80


def test_one_check_is_run_as_a_notebook_would(student: Path) -> None:
    folder, checked = doctor.work()
    assert folder.told.endswith("home") and checked.told.startswith("a check takes 0.")
    assert not student.exists()  # looking changes nothing


def test_a_step_that_fails_is_a_problem_and_the_next_one_still_runs() -> None:
    def broken() -> Iterator[Finding]:
        raise OSError("libgomp.so.1: cannot open shared object file")
        yield

    def without_a_package() -> Iterator[Finding]:
        import no_such_package  # noqa: F401

        yield Finding(OK, "never", "")

    found = list(examine((broken, without_a_package, doctor.python)))
    assert [finding.state for finding in found] == [PROBLEM, NOTE, OK]
    assert "libgomp" in found[0].told and "no_such_package" in found[1].told


def test_missing_and_old_packages_are_told_apart_by_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"transformers": "4.57.1", "nbval": None, "fastapi": None}
    monkeypatch.setattr(doctor, "installed_version", lambda name: here.get(name, "999"))
    needed, optional = (f for f in doctor.packages() if f.state != OK and f.what == "packages")
    assert needed.state == PROBLEM and needed.told == "missing: transformers 4.57.1 (older than 5)"
    assert optional.state == NOTE and "nbval, for checking whole notebooks" in optional.told and "fastapi" in optional.told


def test_requirements_are_pyprojects() -> None:
    found = list(requirements())
    assert ("dependencies", "torch", "2.9") in found and ("labs", "ipywidgets", "8") in found
    assert not any(group == "dev" for group, _, _ in found)


def test_a_requirement_of_another_system_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.platform, "system", lambda: "Darwin")
    assert "triton" not in [name for _, name, _ in requirements()]


@pytest.mark.parametrize(
    ("have", "minimum", "expected"),
    [
        ("2.9.1+cpu", "2.9", False),
        ("2.13.0", "2.9", False),
        ("4.57", "5", True),
        ("8", "8.0", False),
        ("0.60.0rc1", "0.61", True),
    ],
)
def test_versions_are_compared_as_numbers(have: str, minimum: str, expected: bool) -> None:
    assert older(have, minimum) is expected


def test_a_network_that_does_not_answer_is_a_note_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(command: list[str], timeout: float, **_: Any) -> Any:
        assert timeout <= 10
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(doctor.subprocess, "run", hangs)
    (finding,) = doctor.network()
    assert finding.state == NOTE and "no answer within" in finding.told and "--from FILE" in finding.do


def test_a_model_that_is_not_here_yet_is_a_note_that_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "nowhere" / "yet"))
    (finding,) = doctor.model()
    assert finding.state == NOTE and "minivllm fetch smollm2-135m" in finding.do
    assert not (tmp_path / "nowhere").exists()  # looking changes nothing


def test_a_torch_that_ends_python_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    crash = subprocess.CompletedProcess([], -4, "", "")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: crash)
    (finding,) = doctor.pytorch()
    assert finding.state == PROBLEM and "status -4" in finding.told


def test_long_findings_are_wrapped_and_commands_are_not() -> None:
    command = "python -m pip install " + " ".join(f"package{i}" for i in range(12))
    *told, do = lines_of(Finding(NOTE, "packages", "word " * 40, command))
    assert all(len(line) <= doctor.WIDTH for line in told) and do.endswith(command)


def test_a_driver_that_hangs_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from checks import install

    def hang(command: list[str], **options: object) -> None:
        raise subprocess.TimeoutExpired(command, 20)

    monkeypatch.setattr(install.Path, "exists", lambda path: False)
    monkeypatch.setattr(install.shutil, "which", lambda name: name)
    monkeypatch.setattr(install.subprocess, "run", hang)
    assert not install.has_nvidia_gpu()
