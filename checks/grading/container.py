"""python -m checks grade ... --container: the same command in a container without a network, made from the Containerfile.

The submissions are mounted for reading, OUT for writing, and nothing else of this machine is in it. Namespaces may be made in
there (the container's own filter forbids that by default, and ours is stricter for the code that matters), so that a student's
code is apart from the grader too, not only both of them from the machine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from checks.authoring.source import ROOT

if TYPE_CHECKING:
    from checks.grading.run import Options

IMAGE = "minivllm-grading"
_CONTAINERFILE = "checks/grading/Containerfile"
_MEMORY_A_JOB = 6  # GiB


def run_in_container(options: Options) -> int:
    """Build the image if it is not there, and grade in it. Returns the exit status. Raises ValueError where there is neither
    docker nor podman."""
    engine = shutil.which("docker") or shutil.which("podman")
    if engine is None:
        raise ValueError("--container needs docker or podman, and neither is installed here.")
    if subprocess.run([engine, "image", "inspect", IMAGE], capture_output=True).returncode != 0:
        build = [engine, "build", "-f", _CONTAINERFILE, "-t", IMAGE, "."]
        print("Building the image, once:", " ".join(build[1:]))
        if subprocess.run(build, cwd=ROOT).returncode != 0:
            raise ValueError(f"The image could not be built from {_CONTAINERFILE}; see above.")
    options.out.mkdir(parents=True, exist_ok=True)
    return subprocess.run(command(engine, options)).returncode


def command(engine: str, options: Options) -> list[str]:
    """The whole command line."""
    mounts = [(options.submissions, "/submissions", "ro"), (options.out, "/out", "rw")]
    arguments = ["/submissions", "--out", "/out", "--jobs", str(options.jobs)]
    for name, path in (("--roster", options.roster), ("--overrides", options.overrides)):
        if path is not None:
            mounts.append((path, f"/in{name.replace('--', '/')}.csv", "ro"))
            arguments += [name, f"/in{name.replace('--', '/')}.csv"]
    for name, value in (
        ("--labs", ",".join(options.labs) if options.labs else None),
        ("--hidden-seed", options.hidden_seed),
        ("--exercise", options.exercise),
    ):
        arguments += [name, value] if value is not None else []
    arguments += [] if options.nbval else ["--no-nbval"]
    volumes = [part for path, place, how in mounts for part in ("-v", f"{path.resolve()}:{place}:{how}")]
    user = ["--user", f"{os.getuid()}:{os.getgid()}"] if hasattr(os, "getuid") and os.getuid() else []
    limits = ["--network", "none", "--cap-drop", "ALL", "--pids-limit", "4096", "--memory", f"{_MEMORY_A_JOB * options.jobs}g"]
    unmasked = "unmask=ALL" if "podman" in engine else "systempaths=unconfined"  # a /proc of one's own needs it
    opened = ["--security-opt", "seccomp=unconfined", "--security-opt", unmasked]
    files = ["--read-only", "--tmpfs", "/tmp:exec", "-e", "HOME=/home/grader"]
    return [engine, "run", "--rm", *limits, *opened, *files, *user, *volumes, IMAGE, *arguments]
