"""CheckFailed: the one exception a student sees from this package, shown as its message and nothing else."""

from __future__ import annotations

from checks.exercises import Row, find, has_checks, table


class CheckFailed(Exception):
    """An exercise is not right yet, or a call of this package makes no sense. Red, so that "run all" stops and nbval fails."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: our frames are no help to a student."""
        return str(self).splitlines()


def row_of(exercise: str) -> Row:
    """The exercise a student named. Raises CheckFailed naming those there are, or the one that is meant."""
    name = str(exercise).strip()  # hint(2.1), without the quotation marks, is as clear
    if not name:
        raise CheckFailed('Which exercise? Its number goes between the brackets, in quotation marks: hint("2.1").')
    try:
        return find(name)
    except ValueError as error:
        digits = "".join(c for c in name if c.isdigit())
        meant = [i for i, row in table().items() if i.replace(".", "") == digits and has_checks(row.lab)]
        raise CheckFailed(f"There is no exercise {name!r} here. Is {meant[0]!r} meant?" if meant else str(error)) from None
