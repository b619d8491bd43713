"""--container: the command line that docker and podman are given, and that what it mounts is all that grading needs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from checks.__main__ import main
from checks.authoring.source import ROOT
from checks.grading import container
from checks.grading.container import IMAGE, command, run_in_container, working_engine
from checks.grading.run import Options
from tests.grading import mangled

# Records how it was called; `run` is the same command on plain paths in place of mounts. Mounts for reading are told apart.
FAKE = """\
#!{python}
import json, os, subprocess, sys
arguments = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps([os.path.basename(sys.argv[0]), *arguments]) + "\\n")
if arguments[0] == "info":
    sys.exit({info})
if arguments[:2] == ["image", "inspect"]:
    sys.exit(0 if os.path.exists({log!r} + ".built") else 1)
if arguments[0] == "build":
    open({log!r} + ".built", "w").close()
    sys.exit({build})
places = {{}}
for flag, volume in zip(arguments, arguments[1:]):
    if flag == "-v":
        path, place, how = volume.split(":")
        places[place] = path
image = next(i for i, a in enumerate(arguments) if a.startswith({image!r}))
mapped = [places.get(a, a) for a in arguments[image + 1 :]]
environment = {{**os.environ, "MINIVLLM_GRADING_CONTAINER": "1"}}
sys.exit(subprocess.run([{python!r}, "-m", "checks", "grade", *mapped], cwd={root!r}, env=environment).returncode)
"""


def put(folder: Path, name: str, *, info: int = 0, build: int = 0) -> Path:
    """An executable of this name on the path; returns its log."""
    folder.mkdir(exist_ok=True)
    log = folder / f"{name}.log"
    text = FAKE.format(python=sys.executable, log=str(log), info=info, build=build, image=IMAGE, root=str(ROOT))
    (folder / name).write_text(text, encoding="utf-8")
    (folder / name).chmod(0o755)
    return log


def calls(log: Path) -> list[list[str]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path / "bin"


@pytest.fixture
def handed_in(tmp_path: Path) -> SimpleNamespace:
    folder = tmp_path / "handed in"
    (folder / "ada").mkdir(parents=True)
    (folder / "ada" / "x.ipynb").write_text(json.dumps(mangled.solved()), encoding="utf-8")
    roster = tmp_path / "class.csv"
    roster.write_text("student\nada\nbob\n", encoding="utf-8")
    return SimpleNamespace(folder=folder, roster=roster, out=tmp_path / "out")


def line(engine: str, handed_in: SimpleNamespace, **more: object) -> list[str]:
    return command(engine, "image", Options(handed_in.folder, handed_in.out, **more))  # type: ignore[arg-type]


posix = pytest.mark.skipif(not hasattr(os, "getuid"), reason="users have numbers, and scripts a first line, on POSIX")


@posix
def test_it_builds_once_mounts_what_is_given_and_grades(bin_folder: Path, handed_in: SimpleNamespace) -> None:
    log = put(bin_folder, "docker")
    arguments = ["grade", str(handed_in.folder), "--out", str(handed_in.out), "--labs", "04", "--jobs", "1", "--no-nbval"]
    assert main([*arguments, "--roster", str(handed_in.roster), "--exercise", "4.3", "--container"]) == 0  # nothing graded yet
    assert main([*arguments, "--container"]) == 0
    info, inspect, build, first, _, _, second = calls(log)
    assert (info, inspect[:3], build[:2]) == (["docker", "info"], ["docker", "image", "inspect"], ["docker", "build"])
    image = first[first.index("-t") + 1] if "-t" in first else build[build.index("-t") + 1]
    assert image.startswith(f"{IMAGE}:") and inspect[3] == image and (ROOT / build[build.index("-f") + 1]).is_file()
    tail = "--out /out --jobs 1 --roster /in/class.csv --labs 04".replace("class", "roster").split()
    assert first[first.index(image) + 1 :] == ["/submissions", *tail, "--exercise", "4.3", "--no-nbval"]
    assert second[second.index(image) + 1 :] == ["/submissions", *tail, "--no-nbval"]  # with the roster of the last run
    rows = (handed_in.out / "gradebook.csv").read_text(encoding="utf-8").splitlines()
    assert [row.split(",")[0] for row in rows] == ["student", "ada", "bob"] and ",1," in rows[1]
    record = next((handed_in.out / ".state").glob("ada-04-*.json")).read_text(encoding="utf-8")
    assert json.loads(record)["isolation"] == "container"


@posix
def test_nothing_else_of_this_machine_is_in_it_and_no_network(handed_in: SimpleNamespace) -> None:
    told = line("/usr/bin/docker", handed_in, roster=handed_in.roster, jobs=2)
    volumes = [told[i + 1] for i, part in enumerate(told) if part == "-v"]
    assert volumes == [
        f"{handed_in.folder}:/submissions:ro", f"{handed_in.out}:/out:rw", f"{handed_in.roster}:/in/roster.csv:ro",
    ]  # fmt: skip
    joined = " ".join(told)
    for wanted in ("--network none", "--cap-drop ALL", "--read-only", "--memory 12g", "--pids-limit 4096", "--rm"):
        assert wanted in joined
    assert "--privileged" not in joined and "docker.sock" not in joined


@posix
def test_out_belongs_to_whoever_started_it(handed_in: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getgid", lambda: 20)
    for uid, engine, wanted in (
        (0, "docker", "--cap-add SETFCAP --user 0:20"),
        (0, "podman", "--cap-add SETFCAP --user 0:20"),
        (501, "docker", "--user 501:20"),
        (501, "podman", "--userns keep-id --user 501:20"),
    ):
        monkeypatch.setattr(os, "getuid", lambda uid=uid: uid)
        told = " ".join(line(f"/usr/bin/{engine}", handed_in))
        assert wanted in told and ("keep-id" in told) == ("keep-id" in wanted)


def test_each_engine_has_its_own_word_for_a_proc_that_can_be_mounted(handed_in: SimpleNamespace) -> None:
    assert "systempaths=unconfined" in line("/usr/local/bin/docker", handed_in)
    assert "unmask=ALL" in line("/opt/podman", handed_in)
    assert "systempaths=unconfined" in line("/home/podman-user/bin/docker", handed_in)


def test_a_zip_stays_a_zip_in_there(handed_in: SimpleNamespace, tmp_path: Path) -> None:
    archive = tmp_path / "all.zip"
    archive.write_bytes(b"PK")
    told = command("docker", "image", Options(archive, handed_in.out))
    assert f"{archive}:/submissions.zip:ro" in told and told[told.index("image") + 1] == "/submissions.zip"


@posix
def test_a_docker_that_does_not_answer_is_passed_over_for_a_podman_that_does(bin_folder: Path) -> None:
    put(bin_folder, "docker", info=1)
    with pytest.raises(ValueError, match="docker info` fails"):
        working_engine()
    put(bin_folder, "podman")
    assert working_engine() == str(bin_folder / "podman")


def test_without_an_engine_it_says_what_is_needed(bin_folder: Path) -> None:
    with pytest.raises(ValueError, match="needs docker or podman"):
        working_engine()


@posix
def test_an_image_that_cannot_be_built_grades_nothing(bin_folder: Path, handed_in: SimpleNamespace) -> None:
    log = put(bin_folder, "docker", build=1)
    with pytest.raises(ValueError, match="could not be built"):
        run_in_container(Options(handed_in.folder, handed_in.out))
    assert [call[1] for call in calls(log)] == ["info", "image", "build"]


def test_a_clone_that_has_changed_has_another_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("checks/grading/Containerfile", "checks/a.py", "minivllm/b.py", "solutions/c.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(container, "ROOT", tmp_path)
    before = container._version()
    assert container._version() == before
    for name in ("checks/grading/Containerfile", "checks/a.py", "minivllm/b.py", "solutions/c.py", "pyproject.toml"):
        (tmp_path / name).write_text("2")
        assert container._version() != before
        (tmp_path / name).write_text("1")


def test_paths_that_an_engine_would_misread_are_refused(handed_in: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*gone\.csv"):
        line("docker", handed_in, roster=tmp_path / "gone.csv")
    if sys.platform != "win32":
        (tmp_path / "a:b").mkdir()
        with pytest.raises(ValueError, match="colon"):
            command("docker", "image", Options(tmp_path / "a:b", handed_in.out))


def test_the_recipe_copies_what_is_there_and_the_ignore_file_lets_it_in() -> None:
    recipe = (ROOT / container._CONTAINERFILE).read_text(encoding="utf-8")
    ignored = (ROOT / f"{container._CONTAINERFILE}.dockerignore").read_text(encoding="utf-8").splitlines()
    copied = [word for row in recipe.splitlines() if row.startswith("COPY") for word in row.split()[1:-1]]
    assert copied and all((ROOT / name).exists() and f"!{name}" in ignored for name in copied)
