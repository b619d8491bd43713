"""What the HTML files have in common: one self-contained page each, readable by everybody, in which no text is markup.

Nothing is loaded from anywhere and no script runs (the Content-Security-Policy says so too, should an escape ever fail). Words
stand beside every colour; colours have a contrast of at least 4.5 to 1, in the light and in the dark.
"""

from __future__ import annotations

import html

from checks.grading.tables import visible

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --line: #d0d7de; --back: #fff; --box: #f6f8fa;
  --good: #116329; --bad: #a40e26; --open: #6e4b00; --bar-good: #009e73; --bar-bad: #d55e00; --bar: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9da7b1; --line: #3d444d; --back: #0d1117;
  --box: #161b22; --good: #56d364; --bad: #ff9790; --open: #e3b341; --bar: #58a6ff; } }
body { color: var(--text); background: var(--back); font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto;
  padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; }
h2 { margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; margin: 0.8rem 0; }
caption { text-align: left; color: var(--soft); padding-bottom: 0.3rem; }
th, td { text-align: left; vertical-align: top; padding: 0.4rem 0.7rem 0.4rem 0; border-bottom: 1px solid var(--line); }
td.number, th.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
tr.open-below > * { border-bottom: none; }
td p { margin: 0.3rem 0; }
td p:first-child { margin-top: 0; }
td p:last-child { margin-bottom: 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; direction: ltr; background: var(--box);
  border-left: 4px solid var(--line); padding: 0.6rem 0.8rem; margin: 0.4rem 0; font: 14px/1.45 ui-monospace, monospace; }
bdi, code { overflow-wrap: anywhere; }
.good { color: var(--good); font-weight: 600; white-space: nowrap; }
.bad { color: var(--bad); font-weight: 600; }
.open { color: var(--open); font-weight: 600; }
.set { font-weight: 600; white-space: nowrap; }
.soft, .asks { color: var(--soft); }
.asks { font-weight: 400; display: block; }
figure { margin: 1rem 0; }
svg { max-width: 100%; height: auto; }
svg text { fill: var(--text); font: 13px system-ui, sans-serif; }
figcaption { color: var(--soft); }
summary { cursor: pointer; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(title: str, body: str) -> str:
    """A whole document. `title` is text, `body` is markup."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def text(value: str) -> str:
    """Any text as markup that shows it, in an element and in an attribute."""
    return html.escape(visible(value), quote=True)


def name(value: str) -> str:
    """A name, kept from turning the words around it, whichever way it is written."""
    return f"<bdi>{text(value)}</bdi>"


def block(value: str, limit: int = 2000) -> str:
    """A message with its lines, cut at `limit` characters."""
    clean = visible(value.replace("\r\n", "\n"), keep="\n").strip("\n")
    cut = clean[:limit] + ("\n... (cut here)" if len(clean) > limit else "")
    return f"<pre>{html.escape(cut, quote=True)}</pre>"


def table(
    caption: str,
    header: list[str],
    rows: list[list[str]],
    numbers: frozenset[int] = frozenset(),
    below: list[str] | None = None,
) -> str:
    """`header` and `rows` are markup; the first cell of a row heads it. `numbers` are the columns set to the right; `below` is
    what stands under each row, over the table's whole width ("" for nothing)."""

    def cell(tag: str, column: int, content: str, scope: str = "") -> str:
        kind = ' class="number"' if column in numbers else ""
        return f"<{tag}{scope}{kind}>{content}</{tag}>"

    head = "".join(cell("th", i, content, ' scope="col"') for i, content in enumerate(header))
    lines = []
    for row, more in zip(rows, below or [""] * len(rows), strict=True):
        cells = cell("th", 0, row[0], ' scope="row"') + "".join(cell("td", i, c) for i, c in enumerate(row[1:], 1))
        lines.append(f'<tr class="open-below">{cells}</tr>' if more else f"<tr>{cells}</tr>")
        if more:
            lines.append(f'<tr><td colspan="{len(header)}">{more}</td></tr>')
    return (
        f"<table><caption>{caption}</caption><thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(lines)
        + "\n</tbody></table>"
    )
