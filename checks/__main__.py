"""python -m checks COMMAND: what is wanted outside of a notebook, by students (doctor, status, restore) and by authors (build).

Imports the standard library alone until a command needs more: `doctor` must start where nothing is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

FOR_INSTRUCTORS = ("build", "grade", "release")  # a student folder does not have them


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m checks", description="The labs' tools.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="make the notebooks of solutions/ and labs/ from solutions/*.py")
    build.add_argument("labs", nargs="*", metavar="LAB", help="lab numbers, such as 02; all if none is given")
    build.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a built file is not what its source says"
    )
    build.add_argument("--execute", action="store_true", help="run the solution notebooks and keep their outputs")
    commands.add_parser("doctor", help="what this machine has, how fast it is, and what to do about what is missing")
    commands.add_parser("status", help="what has been passed, predicted and answered")
    reset = commands.add_parser("reset", help="forget an exercise, or a whole lab; cells are left as they are")
    reset.add_argument("what", metavar="EXERCISE", help="such as 4.1, or 04 for the lab")
    commands.add_parser("selftest", help="ten small questions on what the labs take for granted")
    restore = commands.add_parser("restore", help="rebuild progress and my_engine/ from notebooks alone")
    restore.add_argument("notebooks", nargs="+", metavar="NOTEBOOK", help="such as labs/*.ipynb")
    restore.add_argument("--no-check", action="store_true", help="take the answers as they stand, without checking them again")
    update = commands.add_parser("update", help="bring notebooks to a newer version of their labs; your cells stay")
    update.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="default: those in labs/")
    update.add_argument(
        "--from",
        dest="source",
        default="HEAD",
        metavar="WHERE",
        help="a folder with the new labs, or a git revision (%(default)s)",
    )
    pack = commands.add_parser("pack", help="a student's work as one file: notebooks, progress, results")
    pack.add_argument("file", nargs="?", default="minivllm-work.zip", metavar="FILE", help="default: %(default)s")
    pack.add_argument("--notebooks", nargs="+", metavar="NOTEBOOK", help="default: those in labs/")
    unpack = commands.add_parser("unpack", help="put a packed work in its places; what it replaces is kept")
    unpack.add_argument("file", metavar="FILE")
    unpack.add_argument("--into", metavar="FOLDER", help="where the notebooks go; default: labs/")
    _add_for_instructors(commands)
    return parser


def _add_for_instructors(commands: Any) -> None:
    release = commands.add_parser("release", help="for instructors: the folder a student is given, or an nbgrader course")
    release.add_argument("--labs", metavar="LABS", help="such as 00-07 or 04,05; default: all")
    release.add_argument("--out", required=True, metavar="DIR", help="a new folder")
    release.add_argument("--nbgrader", action="store_true", help="source notebooks for nbgrader, with its configuration")
    release.add_argument(
        "--with-answers", action="store_true", help="solutions/*.py too: skip and solution then work everywhere"
    )
    grade = commands.add_parser("grade", help="for instructors: points, feedback and reports for a folder of submissions")
    grade.add_argument("submissions", metavar="SUBMISSIONS", help="a folder or a zip, as the learning system exports it")
    grade.add_argument("--out", required=True, metavar="DIR", help="where everything goes; the same again resumes")
    grade.add_argument("--labs", metavar="LABS", help="such as 04 or 04,05 or 00-07; default: whatever was handed in")
    grade.add_argument("--jobs", type=int, metavar="N", help="how many at once; default: half of the cores")
    grade.add_argument("--roster", metavar="CSV", help="who is in the class")
    grade.add_argument("--overrides", metavar="CSV", help="points that you decide: student,item,points,reason")
    grade.add_argument("--hidden-seed", metavar="S", help="what the hidden tests are drawn from; default: DIR's own secret")
    grade.add_argument("--exercise", metavar="N.M", help="regrade this exercise alone; all else stays as it was")
    grade.add_argument("--no-nbval", action="store_true", help="points only; do not run the notebooks as a whole")
    grade.add_argument("--container", action="store_true", help="in a container (docker or podman)")


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command in FOR_INSTRUCTORS and importlib.util.find_spec("checks.grading") is None:
        parser.error(f"{options.command} is for instructors, and not part of what you were given")
    if options.command == "build":
        if options.check and options.execute:
            parser.error("--check writes nothing, so there is nothing to --execute")
        from checks.authoring.build import main as build_main

        return build_main(options.labs, check=options.check, execute=options.execute)
    if options.command == "release":
        if options.nbgrader and options.with_answers:
            parser.error("--nbgrader has the answers in its source notebooks; --with-answers is for the student folder")
        from checks.grading.release import main as release_main

        return release_main(options.labs, options.out, nbgrader=options.nbgrader, with_answers=options.with_answers)
    if options.command == "grade":
        from checks.grading.run import main as grade_main

        return grade_main(options)
    if options.command == "doctor":
        from checks.doctor import main as doctor_main

        return doctor_main()
    from checks.student.failure import CheckFailed

    try:
        return _for_students(options)
    except (CheckFailed, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _for_students(options: argparse.Namespace) -> int:
    if options.command == "restore":
        from checks.student import restore

        return restore.main(options.notebooks, check=not options.no_check)
    if options.command == "update":
        from checks.student import restore, update

        return update.main(restore.expanded(options.notebooks), options.source)
    if options.command == "pack":
        from checks.student import pack, restore

        return pack.main_pack(options.file, restore.expanded(options.notebooks) if options.notebooks else None)
    if options.command == "unpack":
        from checks.student import pack

        return pack.main_unpack(options.file, options.into)
    if options.command == "selftest":
        from checks.student.selftest import selftest

        selftest()
        return 0
    if options.command == "reset":
        from checks.student.help import reset

        reset(options.what)
        return 0
    from checks.student.overview import progress

    progress()
    return 0


if __name__ == "__main__":
    sys.exit(main())
