"""Finds what students handed in: in folders, in zips, in what a learning system exports. Says whose each file is, from its name
and folder, and nothing else; what lab it is, the notebook says itself (recognize).

    alice/04_paged_kv.ipynb                                             a folder a student (nbgrader's submitted/ too)
    alice.ipynb   alice_04_paged_kv.ipynb   alice.zip                   a file a student
    doejane_4711_998877_04_paged_kv.ipynb   doejane_LATE_4711_...       Canvas: name, id, number of the file
    Jane Doe_4711_assignsubmission_file_/04_paged_kv.ipynb              Moodle, as folders or as one name
    Lab 4_jdoe_attempt_2026-11-30-14-05-09_04_paged_kv.ipynb            Blackboard
    jane-doe_4711_2026-11-30_14-05-09.ipynb                             name, id, time
"""

from __future__ import annotations

import io
import json
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from checks.exercises import table
from checks.student.ipynb import MAX_BYTES, Notebook

MAX_DEPTH = 3  # zips in zips
MAX_FILES = 20_000
PROGRESS = "progress/progress.json"  # in what `python -m checks pack` makes, and in a student's folder
_SKIPPED = ("__MACOSX", ".ipynb_checkpoints", ".git", "my_engine")
_PLAIN_FOLDERS = ("notebooks", "labs", "submitted", "submissions", "minivllm-work", "solutions")
_TIME = r"(?P<time>\d{4}-?\d\d-?\d\d[-_T ]?\d\d[-:h]?\d\d(?:[-:m]?\d\d)?|\d{10,14})"
_PATTERNS = (  # what comes after the student may be anything, or nothing
    re.compile(r"^.*?_(?P<student>[^_]+)_attempt_" + _TIME),
    re.compile(r"^(?P<student>.+?_\d+)_assign(?:submission|feedback)_"),
    re.compile(r"^(?P<student>[^_\d][^_]*_\d{2,})_(?P<time>\d{4}-\d\d-\d\d[-_T ]\d\d[-:]\d\d(?:[-:]\d\d)?|\d{14})"),
    re.compile(r"^(?P<name>[^_\d][^_]*)(?:_LATE)?_(?P<id>\d{2,})_(?P<time>\d{2,})(?:_|\.|$)"),
)


@dataclass(frozen=True)
class Found:
    """A file that was handed in. `data` is None for one that is too large to be read; `time` orders several of one student."""

    student: str
    name: str  # with its folders, as handed in
    time: str
    data: bytes | None
    size: int
    problem: str = ""  # why a zip could not be read


def find_submissions(root: Path) -> list[Found]:
    """Everything under a folder, or in a zip, that may be a notebook, in the order of its names. Raises ValueError if there is
    no such place."""
    if not root.exists():
        raise ValueError(f"There is no {root}. Give the folder, or the zip, with the submissions.")
    found: list[Found] = []
    if root.is_file():
        files: Iterable[tuple[PurePosixPath, Path]] = [(PurePosixPath(root.name), root)]
    else:
        files = ((PurePosixPath(p.relative_to(root).as_posix()), p) for p in sorted(root.rglob("*")) if p.is_file())
    for name, path in files:
        size = path.stat().st_size
        if name.suffix.lower() == ".zip":
            inner = name.with_suffix("") if path != root else PurePosixPath()
            try:
                with path.open("rb") as file:
                    found += _in_zip(file, inner, name, 1)
            except OSError as error:
                found.append(_found(name, None, size, f"it cannot be read ({error.strerror})"))
        elif _may_be_wanted(name):
            found.append(_of_file(name, path, size))
        if len(found) > MAX_FILES:
            raise ValueError(f"{root} has more than {MAX_FILES:,} notebooks in it. Is it the right folder?")
    return found


def _of_file(name: PurePosixPath, path: Path, size: int) -> Found:
    try:
        return _found(name, path.read_bytes() if size <= MAX_BYTES else None, size)
    except OSError as error:
        return _found(name, b"", size, f"it cannot be read ({error.strerror})")


def _in_zip(file: io.BufferedIOBase | io.BytesIO, inside: PurePosixPath, name: PurePosixPath, depth: int) -> Iterator[Found]:
    """The notebooks of a zip; one that is damaged is reported as one file. Nothing is written to the disk."""
    try:
        with zipfile.ZipFile(file) as archive:
            for info in sorted(archive.infolist(), key=lambda i: i.filename):
                member = inside / PurePosixPath(*_harmless(info.filename))
                if info.is_dir() or not (_may_be_wanted(member) or member.suffix.lower() == ".zip"):
                    continue
                data = _member(archive, info)
                if member.suffix.lower() != ".zip":
                    yield _found(member, data, info.file_size)
                elif data is None:
                    yield _found(member, None, info.file_size)
                elif depth >= MAX_DEPTH:
                    told = f"it is a zip in a zip, too deep: {MAX_DEPTH} in each other are opened; hand in the notebook itself"
                    yield _found(member, b"", info.file_size, told)
                else:
                    yield from _in_zip(io.BytesIO(data), member.with_suffix(""), member, depth + 1)
    except (zipfile.BadZipFile, RuntimeError, NotImplementedError, EOFError, OSError, ValueError, zlib.error) as error:
        yield _found(name, b"", 0, f"the zip is damaged, or locked with a password ({type(error).__name__})")


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes | None:
    """None if it is too large, whatever its own header says."""
    if info.file_size > MAX_BYTES:
        return None
    with archive.open(info) as member:
        data = member.read(MAX_BYTES + 1)
    return data if len(data) <= MAX_BYTES else None


def _harmless(name: str) -> list[str]:
    """The parts of a path in a zip, without any that lead elsewhere."""
    return [part for part in name.replace("\\", "/").split("/") if part not in ("", ".", "..")] or ["unnamed"]


def _may_be_wanted(name: PurePosixPath) -> bool:
    hidden = any(part in _SKIPPED or part.startswith("._") for part in name.parts)
    return not hidden and (".ipynb" in name.name.lower() or str(name).endswith(PROGRESS))


def student_id_in(found: Found) -> str | None:
    """What draws a student's numbers, from their progress file."""
    try:
        told = json.loads(found.data or b"").get("student")
    except (ValueError, AttributeError, RecursionError):
        return None
    return told if isinstance(told, str) and 0 < len(told) <= 64 else None


def _found(name: PurePosixPath, data: bytes | None, size: int, problem: str = "") -> Found:
    student, time = whose(name)
    return Found(student, str(name), time, data, size, problem)


def whose(name: PurePosixPath) -> tuple[str, str]:
    """(student, time) of a file, by its path below the folder of all submissions: the innermost part that a learning system has
    named, else the outermost folder that is not just "notebooks", else the name."""
    for part in reversed(name.parts):
        for pattern in _PATTERNS:
            if match := pattern.match(part):
                groups = match.groupdict()
                student = groups.get("student") or f"{groups['name']}_{groups['id']}"
                return student.strip(), groups.get("time") or ""
    for folder in name.parts[:-1]:
        if folder.lower() not in _PLAIN_FOLDERS:
            return folder.strip(), ""
    stem = re.sub(r"\.(?:ipynb.*|zip)$", "", name.name, flags=re.IGNORECASE)
    stem = re.sub(r"(?:[-_ ]*(?:lab[-_ ]?)?\d\d_[a-z_]+)?(?:-Copy\d+| ?\(\d+\))?$", "", stem) or stem
    return stem.strip(" -_") or "unnamed", ""


# ---------------------------------------------------------------------------------------------------------- which lab


def recognize(notebook: Notebook) -> str | None:
    """The lab of a notebook ("04"): its metadata says so; where that was lost, the exercises in its cells do."""
    labs = {row.lab for row in table().values()}
    if notebook.lab in labs:
        return notebook.lab
    counted = Counter(table()[cell.exercise].lab for cell in notebook.cells if cell.exercise)
    return counted.most_common(1)[0][0] if counted else None


def version_of(notebook: Notebook) -> str:
    """The lab version in its metadata, "" if it says none."""
    own = _own(notebook)
    return str(own.get("version", ""))[:20]


def kind_of(notebook: Notebook) -> str:
    return str(_own(notebook).get("kind", ""))


def _own(notebook: Notebook) -> dict[str, object]:
    metadata = notebook.raw.get("metadata")
    own = metadata.get("minivllm") if isinstance(metadata, dict) else None
    return own if isinstance(own, dict) else {}


def guess_lab(name: str, slugs: dict[str, str]) -> str | None:
    """For a file that cannot be read: the lab whose slug ("04_paged_kv") its name has in it."""
    found = [lab for lab, slug in slugs.items() if slug.lower() in name.lower().replace(" ", "_")]
    return found[0] if len(found) == 1 else None
