"""CheckFailed: the one exception a student sees from this package, shown as its message and nothing else."""

from __future__ import annotations

from checks.exercises import Row, find


class CheckFailed(Exception):
    """An exercise is not right yet, or a call of this package makes no sense. Red, so that "run all" stops and nbval fails."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: our frames are no help to a student."""
        return str(self).splitlines()


def row_of(exercise: str) -> Row:
    """The exercise a student named. Raises CheckFailed naming those there are."""
    try:
        return find(str(exercise).strip())  # hint(2.1), without the quotation marks, is as clear
    except ValueError as error:
        raise CheckFailed(str(error)) from None
