"""python -m checks build|status: for authors of labs, and a student's overview."""

from __future__ import annotations

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m checks", description="The labs' tools.")
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="make the notebooks of solutions/ and labs/ from solutions/*.py")
    build.add_argument("labs", nargs="*", metavar="LAB", help="lab numbers, such as 02; all if none is given")
    build.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a built file is not what its source says"
    )
    build.add_argument("--execute", action="store_true", help="run the solution notebooks and keep their outputs")
    commands.add_parser("status", help="what has been passed, predicted and answered")
    options = parser.parse_args(arguments)
    if options.command == "build":
        if options.check and options.execute:
            parser.error("--check writes nothing, so there is nothing to --execute")
        from checks.authoring.build import main as build_main

        return build_main(options.labs, check=options.check, execute=options.execute)
    from checks.student.overview import progress

    progress()
    return 0


if __name__ == "__main__":
    sys.exit(main())
