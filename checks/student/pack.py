"""python -m checks pack | unpack: a student's work as one file, to carry from a machine whose disk forgets.

    minivllm.json            says what this file is
    notebooks/*.ipynb        as they are
    progress/progress.json   progress/answers/2.2.py   results/02.json

my_engine/ is not in it: it is made from the answers.
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from checks.student.engine import build
from checks.student.failure import CheckFailed
from checks.student.home import ROOT, answers_dir, home, locked, new_backup, results_dir, write_atomically

NAME = "minivllm-work.zip"
LABS = ROOT / "labs"
MAX_UNPACKED_BYTES = 500 << 20
_MANIFEST, _VERSION = "minivllm.json", 1
_ALLOWED = re.compile(
    r"notebooks/[^/\\:\x00-\x1f]+\.ipynb|progress/progress\.json|progress/answers/\d+\.\d+\.py|results/\d\d\.json"
)  # nothing that could land elsewhere


def pack(target: Path, notebooks: Iterable[Path] | None = None) -> list[str]:
    """Write the student's work, with these notebooks (None: those in labs/), to `target`, all of it or nothing. Returns the
    names in it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with locked(), zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(_MANIFEST, json.dumps({"what": "minivllm labs, a student's work", "version": _VERSION}))
            names = []
            for name, path in _work(sorted(LABS.glob("*.ipynb")) if notebooks is None else notebooks):
                if name in names:
                    raise CheckFailed(f"Two notebooks are called {path.name}. Rename one, then pack again.")
                archive.write(path, name)
                names.append(name)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return names


def _work(notebooks: Iterable[Path]) -> Iterator[tuple[str, Path]]:
    """(name in the archive, file)."""
    for path in notebooks:
        yield f"notebooks/{path.name}", path
    progress = home() / ".progress" / "progress.json"
    if progress.is_file():
        yield "progress/progress.json", progress
    for path in sorted(answers_dir().glob("*.py")):
        yield f"progress/answers/{path.name}", path
    for path in sorted(results_dir().glob("[0-9][0-9].json")):
        yield f"results/{path.name}", path


def unpack(source: Path, into: Path | None = None) -> tuple[list[str], Path | None]:
    """Put the work of `source` in its places, the notebooks `into` a folder (labs/). What is there already and differs is
    packed first. Returns the names, and where the former work is kept (None if nothing was replaced)."""
    folder = LABS if into is None else into
    with locked():
        contents = _read(source)
        places = {name: _place(name, folder) for name in contents}
        replaced = [name for name, path in places.items() if path.is_file() and path.read_bytes() != contents[name]]
        kept = None
        if replaced:
            kept = new_backup("before-unpack", ".zip")
            pack(kept, [path for name, path in places.items() if name.startswith("notebooks/") and path.is_file()])
        for name, path in places.items():
            write_atomically(path, contents[name].decode("utf-8"))
        build()
    return list(contents), kept


def _read(source: Path) -> dict[str, bytes]:
    """All files of a packed work, read before anything is written. Raises CheckFailed for what is no such file, or would be too
    large once it is unpacked (a file of zeros packs to a thousandth)."""
    try:
        with zipfile.ZipFile(source) as archive:
            if (size := sum(entry.file_size for entry in archive.infolist())) > MAX_UNPACKED_BYTES:
                limit = MAX_UNPACKED_BYTES / 1e6
                raise CheckFailed(f"{source} unpacks to {size / 1e6:,.0f} MB; the work of all labs is under {limit:,.0f} MB.")
            manifest = json.loads(archive.read(_MANIFEST))
            if manifest.get("version") != _VERSION:
                raise CheckFailed(f"{source} was packed by another version of the labs ({manifest.get('version')}).")
            names = [name for name in archive.namelist() if name != _MANIFEST]
            odd = [name for name in names if not _ALLOWED.fullmatch(name)]
            if odd:
                raise CheckFailed(f"{source} holds {odd[0]!r}, which pack never writes. Nothing was unpacked.")
            contents = {name: archive.read(name) for name in names}
            for data in contents.values():
                data.decode("utf-8")
    except CheckFailed:
        raise
    except Exception as error:  # whatever the archive's parsers raise: cut short, encrypted, packed in another way
        raise CheckFailed(f"{source} is not a file that `python -m checks pack` wrote ({error}).") from None
    return contents


def _place(name: str, notebooks: Path) -> Path:
    kind, _, rest = name.partition("/")
    return {"notebooks": notebooks, "progress": home() / ".progress", "results": results_dir()}[kind] / rest


def main_pack(target: str, names: list[Path] | None) -> int:
    """`python -m checks pack`."""
    path = Path(target)
    if path.is_dir():
        path = path / NAME
    packed = pack(path, names)
    kinds = [name.partition("/")[0] for name in packed]
    print(
        f"{path}: notebooks {kinds.count('notebooks')}, answers {sum('/answers/' in name for name in packed)},"
        f" results {kinds.count('results')}; {path.stat().st_size / 1e3:.0f} kB.\n"
        f"Elsewhere, in a clone: python -m checks unpack {path.name}"
    )
    return 0


def main_unpack(source: str, into: str | None) -> int:
    """`python -m checks unpack`."""
    names, kept = unpack(Path(source), Path(into) if into else None)
    where = Path(into) if into else LABS
    print(f"{sum(name.startswith('notebooks/') for name in names)} notebooks are in {where}, everything else in {home()}.")
    if kept:
        print(f"What was there before and differed is kept: {kept}")
    return 0
