"""CSV files that a spreadsheet may open: no cell a student has a say in can become a formula.

A text that begins with =, +, -, @ or a control character is run as a formula by Excel, LibreOffice and Google Sheets, whatever
its quotes; an apostrophe in front makes it text (OWASP, "CSV Injection").
"""

from __future__ import annotations

import csv
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from checks.student.home import write_atomically

Value = str | float | None
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠")  # some spreadsheets take the full-width ones for the plain ones


def csv_text(rows: Iterable[Sequence[Value]]) -> str:
    """Rows as a CSV file's text: numbers as they are, text made harmless, None as an empty cell."""
    return "".join(",".join(map(_cell, row)) + "\n" for row in rows)


def write_csv(path: Path, rows: Iterable[Sequence[Value]]) -> None:
    write_atomically(path, csv_text(rows))


def csv_rows(text: str, dialect: type[csv.Dialect] = csv.excel) -> Iterator[tuple[int, list[str]]]:
    """The lines of a CSV file that are not empty, with their numbers. A row is one line: a quotation mark that is not closed
    would swallow the lines behind it. Raises ValueError naming the line."""
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            row = next(csv.reader([line.removesuffix("\r")], dialect, strict=True), [])
        except csv.Error as error:
            told = "a quotation mark is not closed on its line" if "end of data" in str(error) else str(error)
            raise ValueError(
                f"line {number}: {told}. Each row is one line; a quotation mark in a text is written twice."
            ) from None
        if any(cell.strip() for cell in row):
            yield number, row


def _cell(value: Value) -> str:
    if value is None:
        return ""
    if isinstance(value, (int, float)):
        return number(value)
    text = harmless(value)  # in quotation marks also where another separator is expected: "a;=1+1" must stay one cell
    return '"' + text.replace('"', '""') + '"' if set(text) & set('",;') or text != text.strip() else text


def number(points: float) -> str:
    """2, 0.5, 11.25: no .0, and never 1e-05."""
    return f"{points:.4f}".rstrip("0").rstrip(".")


def harmless(text: str) -> str:
    """A text for a cell: no formula, no character that hides or turns others around, one line."""
    clean = visible(text)
    return f"'{clean}" if clean.lstrip().startswith(_FORMULA) else clean


def visible(text: str, *, keep: str = "") -> str:
    """The text without control characters (but those in `keep`), surrogates, and the marks that turn the order of letters
    around; line ends and tabs become spaces unless they are kept. What is left is fit for CSV, HTML and XML 1.0."""
    out = []
    for character in text:
        if character in keep:
            out.append(character)
        elif character in "\n\r\t\v\f\u2028\u2029":
            out.append(" ")
        elif unicodedata.category(character) in ("Cc", "Cs") or character in _NEVER:
            out.append("\ufffd")
        else:
            out.append(character)
    return "".join(out)


_NEVER = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ufffe\uffff")
