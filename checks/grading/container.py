"""python -m checks grade ... --container: the same command in a container without a network, made from the Containerfile.

The submissions are mounted for reading, OUT for writing, and nothing else of this machine is in it. Namespaces may be made in
there (the container's own filter forbids that by default, and ours is stricter for the code that matters), so that a student's
code is apart from the grader too, not only both of them from the machine.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from checks.authoring.source import ROOT

if TYPE_CHECKING:
    from checks.grading.run import Options

IMAGE = "minivllm-grading"
ENGINES = ("docker", "podman")
_CONTAINERFILE = "checks/grading/Containerfile"
_IN_IT = (
    _CONTAINERFILE,
    "pyproject.toml",
    "minivllm/**/*.py",
    "checks/**/*.py",
    "checks/**/*.yaml",
    "solutions/*.py",
    "labs/*.ipynb",
)
_MEMORY_A_JOB = 6  # GiB


def run_in_container(options: Options) -> int:
    """Build the image if it is not there, and grade in it. Returns the exit status. Raises ValueError where neither docker nor
    podman works."""
    engine, image = working_engine(), f"{IMAGE}:{_version()}"
    if subprocess.run([engine, "image", "inspect", image], capture_output=True).returncode != 0:
        build = [engine, "build", "-f", _CONTAINERFILE, "-t", image, "."]
        print("Building the image, once for this state of the clone:", " ".join(build[1:]), flush=True)
        if subprocess.run(build, cwd=ROOT).returncode != 0:
            raise ValueError(f"The image could not be built from {_CONTAINERFILE}; see above.")
    options.out.mkdir(parents=True, exist_ok=True)
    return subprocess.run(command(engine, image, options)).returncode


def working_engine() -> str:
    """The path of the first engine that answers: docker may be installed without its service, and podman beside it."""
    there = [path for name in ENGINES if (path := shutil.which(name))]
    for path in there:
        if subprocess.run([path, "info"], capture_output=True).returncode == 0:
            return path
    if there:
        raise ValueError(f"--container: `{there[0]} info` fails. Is its service running, and may you use it?")
    raise ValueError("--container needs docker or podman, and neither is installed here.")


def _version() -> str:
    """Of what goes into the image: a clone that has changed is not graded with the checks of before."""
    digest = hashlib.sha256()
    for pattern in _IN_IT:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def command(engine: str, image: str, options: Options) -> list[str]:
    """The whole command line. Raises ValueError for a path that it cannot say."""
    submissions = "/submissions.zip" if options.submissions.is_file() else "/submissions"
    mounts: list[tuple[Path, str, str]] = [(options.submissions, submissions, "ro"), (options.out, "/out", "rw")]
    arguments = [submissions, "--out", "/out", "--jobs", str(options.jobs)]
    for name, path in (("roster", options.roster), ("overrides", options.overrides)):
        if path is not None:
            mounts.append((path, f"/in/{name}.csv", "ro"))
            arguments += [f"--{name}", f"/in/{name}.csv"]
    for name, value in (
        ("--labs", ",".join(options.labs) if options.labs else None),
        ("--hidden-seed", options.hidden_seed),
        ("--exercise", options.exercise),
    ):
        arguments += [name, value] if value is not None else []
    arguments += [] if options.nbval else ["--no-nbval"]
    if missing := [str(path) for path, _, how in mounts if how == "ro" and not path.exists()]:
        raise ValueError(f"--container: there is no {missing[0]}.")  # an engine would make a folder of that name
    volumes = [part for path, place, how in mounts for part in ("-v", _volume(path.resolve(), place, how))]
    limits = ["--network", "none", "--cap-drop", "ALL", "--pids-limit", "4096", "--memory", f"{_MEMORY_A_JOB * options.jobs}g"]
    files = ["--read-only", "--tmpfs", "/tmp:exec", "-e", "HOME=/home/grader"]
    return [engine, "run", "--rm", *limits, *_opened(engine), *files, *_user(engine), *volumes, image, *arguments]


def _volume(path: Path, place: str, how: str) -> str:
    if ":" in str(path) and sys.platform != "win32":
        raise ValueError(f"--container: a path with a colon cannot be mounted: {path}. Rename or move it.")
    return f"{path}:{place}:{how}"


def _opened(engine: str) -> list[str]:
    """What lets a process in there make namespaces, with a /proc of its own, and read what is mounted under SELinux."""
    unmasked = "unmask=ALL" if _is_podman(engine) else "systempaths=unconfined"
    return [part for what in ("seccomp=unconfined", unmasked, "label=disable") for part in ("--security-opt", what)]


def _user(engine: str) -> list[str]:
    """Whoever runs this, so that OUT can be written and what is in it is theirs. Rootless podman has other numbers inside. Root
    makes namespaces of its own only with one capability (Linux 5.12 on), which the code in them does not keep."""
    if not hasattr(os, "getuid"):
        return []
    if os.getuid() == 0:
        return ["--cap-add", "SETFCAP", "--user", f"0:{os.getgid()}"]
    keep = ["--userns", "keep-id"] if _is_podman(engine) else []
    return [*keep, "--user", f"{os.getuid()}:{os.getgid()}"]


def _is_podman(engine: str) -> bool:
    return PurePath(engine).stem.lower() == "podman"
