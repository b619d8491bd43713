"""The builder: one source, two notebooks; what makes a built file stale; what keeps a lab from being handed out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest

from checks.authoring import build, source
from checks.authoring.source import SourceError, read_source, sources, with_answers, with_stubs
from checks.authoring.validate import PARTS, problems_of

LAB_02 = source.SOLUTIONS / "02_naive_generation.py"
TEXT = LAB_02.read_text(encoding="utf-8")


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """solutions/ and labs/ of its own, with Lab 02's source in it."""
    for module in (source, build):
        monkeypatch.setattr(module, "SOLUTIONS", tmp_path / "solutions")
        monkeypatch.setattr(module, "LABS", tmp_path / "labs")
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / LAB_02.name).write_text(TEXT, encoding="utf-8")
    return tmp_path


@pytest.fixture
def problems(tmp_path: Path) -> Callable[[str], str]:
    """What is wrong with a changed source, as one text."""

    def find(text: str) -> str:
        path = tmp_path / LAB_02.name
        path.write_text(text, encoding="utf-8")
        try:
            read = read_source(path)
            return "\n".join(problems_of(read, *build.build(read)))
        except SourceError as error:
            return str(error)

    return find


@pytest.mark.parametrize("path", sources(), ids=lambda p: p.stem)
def test_built_notebooks_are_what_their_source_says(path: Path) -> None:
    assert build.stale(read_source(path)) == []


def test_the_readme_links_to_the_labs_that_are_here() -> None:
    linked = re.findall(r"\]\((\d\d_\w+\.ipynb)\)", (source.LABS / "README.md").read_text(encoding="utf-8"))
    assert linked == sorted(path.name for path in source.LABS.glob("*.ipynb"))


def test_the_solution_has_the_engines_code_and_the_lab_a_stub() -> None:
    solution, lab = build.build(read_source(LAB_02))
    (given,) = [c.source for c in solution.cells if c.id == "exercise-2-3"]
    (blank,) = [c.source for c in lab.cells if c.id == "exercise-2-3"]
    assert "mass_before = probs.cumsum(-1) - probs" in given
    assert blank.endswith('raise NotImplementedError("Exercise 2.3: apply_top_p")\n\n\ncheck("2.3")')


def test_answers_to_questions_stay_out_of_the_lab() -> None:
    _, lab = build.build(read_source(LAB_02))
    cells = {c.id: c.source for c in lab.cells}
    assert cells["quiz-2-q1"] == 'quiz("2.q1", "?")' and cells["predict-2-p1"] == 'predict("2.p1", "?")'
    assert cells["quiz-2-q4"] == 'quiz("2.q4", "?")'


def test_both_notebooks_have_the_same_cell_ids_format_and_lab_number() -> None:
    solution, lab = build.build(read_source(LAB_02))
    assert [c.id for c in solution.cells] == [c.id for c in lab.cells]
    assert (lab.nbformat, lab.nbformat_minor) == (4, 5)
    assert lab.metadata.minivllm == {"lab": "02", "kind": "lab", "version": "1"}
    exercises = [c.metadata.minivllm.exercise for c in lab.cells if "exercise" in c.metadata.get("minivllm", {})]
    assert exercises == ["2.1", "2.2", "2.3"]


def test_jupytext_reads_the_same_cells() -> None:
    jupytext = pytest.importorskip("jupytext")
    theirs = jupytext.reads(TEXT, fmt="py:percent")
    ours = read_source(LAB_02).cells
    assert [(c.cell_type, c.source) for c in theirs.cells] == [(c.kind, c.text) for c in ours]


def test_a_fresh_build_is_up_to_date_and_a_second_changes_nothing(workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build.main([], check=False, execute=False) == 0
    before = {path: path.read_bytes() for path in workshop.rglob("*.ipynb")}
    assert len(before) == 2
    assert build.main([], check=False, execute=False) == 0 and build.main([], check=True, execute=False) == 0
    assert {path: path.read_bytes() for path in workshop.rglob("*.ipynb")} == before


@pytest.mark.parametrize("folder", ["labs", "solutions"])
def test_an_edited_file_is_stale_and_named(workshop: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    build.main([], check=False, execute=False)
    path = workshop / folder / "02_naive_generation.ipynb"
    notebook = json.loads(path.read_text())
    notebook["cells"][4]["source"] += "edited"
    path.write_text(json.dumps(notebook))
    assert build.main([], check=True, execute=False) == 1
    assert f"{folder}/02_naive_generation.ipynb is stale" in capsys.readouterr().out


def test_a_changed_answer_in_the_engine_makes_the_solution_stale(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build.main([], check=False, execute=False)
    monkeypatch.setattr(source, "engine_body", lambda name: "return None")
    assert any("solutions/02_naive_generation.ipynb is stale" in p for p in build.stale(read_source(LAB_02)))


def test_outputs_make_no_file_stale_and_survive_a_build(workshop: Path) -> None:
    build.main([], check=False, execute=False)
    path = workshop / "solutions" / "02_naive_generation.ipynb"
    notebook = nbformat.read(path, as_version=4)
    code = next(c for c in notebook.cells if c.cell_type == "code")
    code.outputs, code.execution_count = [nbformat.v4.new_output("stream", text="1.2 ms\n")], 7
    nbformat.write(notebook, path)
    assert build.main([], check=True, execute=False) == 0
    build.main([], check=False, execute=False)
    assert nbformat.read(path, as_version=4).cells[2].outputs[0].text == "1.2 ms\n"


@pytest.mark.parametrize("before, kept", [("x = 1", True), ("x = (1)  # why", True), ("x = 2", False), ("%time x = 1", False)])
def test_outputs_are_kept_where_comments_alone_changed(before: str, kept: bool, tmp_path: Path) -> None:
    cell = nbformat.v4.new_code_cell(before, id="one")
    cell.outputs = [nbformat.v4.new_output("stream", text="1.2 ms\n")]
    path = tmp_path / "lab.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[cell]), path)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1", id="one")])
    build.keep_outputs(notebook, path)
    assert bool(notebook.cells[0].outputs) is kept


def test_a_file_that_is_missing_or_no_notebook_is_named(workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build.main([], check=False, execute=False)
    (workshop / "labs" / "02_naive_generation.ipynb").unlink()
    (workshop / "solutions" / "02_naive_generation.ipynb").write_text("{")
    assert build.main([], check=True, execute=False) == 1
    shown = capsys.readouterr().out
    assert (
        "labs/02_naive_generation.ipynb is missing" in shown and "solutions/02_naive_generation.ipynb cannot be read" in shown
    )


def test_a_machines_paths_and_pictures_without_text_are_refused_in_outputs() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x", id="a"), nbformat.v4.new_code_cell("y", id="b")])
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", text=f"loaded {Path.home()}/model\n")]
    notebook.cells[1].outputs = [nbformat.v4.new_output("display_data", {"image/png": "aaaa"})]
    found = build.output_problems(notebook)
    assert "names a path of this machine" in found[0] and "without alternative text" in found[1]


# ---------------------------------------------------------------------------------------------------- what is refused


def test_the_source_as_it_is_has_no_problem(problems: Callable[[str], str]) -> None:
    assert problems(TEXT) == ""


@pytest.mark.parametrize("part", PARTS)
def test_a_missing_part_is_named(problems: Callable[[str], str], part: str) -> None:
    assert f"the part {part!r} is missing" in problems(TEXT.replace(f'id="{part}"', 'id="something-else"'))


@pytest.mark.parametrize(
    ("pattern", "replacement", "words"),
    [
        (r"    # END SOLUTION\n", "", "BEGIN SOLUTION without END SOLUTION"),
        (r"    # BEGIN SOLUTION\n", "", "END SOLUTION without BEGIN SOLUTION"),
        (r'\ncheck\("2.1"\)\n', "\n", "an answer stands in a cell whose last line is not check"),
        (r'(id="exercise-2-1".*\n)from checks import check\n', r"\1import checks\n", "not `from checks import check`"),
        (r"# \{\{exercise 2.1\}\}\n", "", "no text has its line {{exercise 2.1}}"),
        (r'quiz\("2.q1", "b"\)', "pass", "question 2.q1 is not asked"),
        (r"show\(\s*figure,\s*alt=[^\n]*\n\)", "show(figure)", "a figure without alternative text"),
        (r"show\(\s*figure,\s*alt=[^\n]*\n\)", 'show(figure, alt=" ")', "a figure without alternative text"),
        (r"import statistics\n", "import matplotlib.pyplot as plt\n", "pyplot shows figures without alternative text"),
        (r"# ## The big idea\n", "# ![](picture.png)\n", "a picture without alternative text"),
        (r"# ## The big idea\n", "# ![x](data:image/png;base64,aaaa)\n", "a picture inside the text"),
        (r'id="help"', 'id="mistakes"', "is used twice"),
        (r'id="help"', 'id="he lp"', "is no cell id"),
        (r"# %% \[markdown\] id=\"help\"", "# %% [markdown]", "a cell without an id"),
        (r"minivllm.sampling.logits.apply_top_p", "minivllm.sampling.logits.apply_top_q", "names no function of the engine"),
        (r"def apply_top_p\(logits: torch.Tensor, p: ", "def apply_top_p(logits: torch.Tensor, q: ", "logits, p in the engine"),
        (r"#     version: 1\n", "", "lacks version"),
    ],
)
def test_a_malformed_source_is_refused(problems: Callable[[str], str], pattern: str, replacement: str, words: str) -> None:
    text, count = re.subn(pattern, replacement, TEXT)
    assert count, "the pattern is not in the source any more"
    assert words in problems(text)


WHOLE_ANSWER = """# %% id="extra"
def mine(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        logits = model(torch.tensor(tokens))
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(token_ids) :]
"""
ITS_LOOP_IN_THE_TEXT = """# %% [markdown] id="extra"
# ```python
# for _ in range(max_new_tokens):
#     logits = model(torch.tensor(tokens))
#     tokens.append(int(logits[-1].argmax()))
# ```
"""
ONE_LINE_ANSWER = """# %% id="extra"
def f(logits, temperature):
    return logits / torch.where(temperature < GREEDY_EPS, 1.0, temperature)[:, None]
"""


@pytest.mark.parametrize("leak", [WHOLE_ANSWER, ITS_LOOP_IN_THE_TEXT, ONE_LINE_ANSWER])
def test_an_answer_anywhere_in_the_lab_is_refused(problems: Callable[[str], str], leak: str) -> None:
    assert "answer stands in cell extra of the lab" in problems(TEXT + "\n\n" + leak)


def test_an_answer_that_is_not_marked_is_refused(problems: Callable[[str], str]) -> None:
    text = TEXT.replace("    # BEGIN SOLUTION\n", "").replace("    # END SOLUTION\n", "")
    assert "greedy_generate is answered in the lab" in problems(text)


def test_an_exercise_of_the_table_without_a_cell_is_refused(problems: Callable[[str], str]) -> None:
    assert "exercise 2.3 of the table has no cell" in problems(TEXT.replace('check("2.3")', 'check("2.2")'))


def test_exercise_data_must_be_complete(problems: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from checks.exercises import lab_02

    incomplete = dataclasses.replace(lab_02.CHECKS["2.1"], hints=(), minutes=0, difficulty=4, cases=lambda seed: [])
    monkeypatch.setitem(lab_02.CHECKS, "2.1", incomplete)
    found = problems(TEXT)
    for words in ("it has no hints", "minutes is 0", "difficulty is 4", "its check has no cases"):
        assert words in found


def test_stubs_and_answers_keep_the_lines_around_them() -> None:
    cell = "a = 1\ndef f(x):\n    # BEGIN SOLUTION\n    return x\n    # END SOLUTION\nb = 2"
    assert with_answers(cell) == "a = 1\ndef f(x):\n    return x\nb = 2"
    assert with_stubs(cell, "9.1") == 'a = 1\ndef f(x):\n    raise NotImplementedError("Exercise 9.1: f")\nb = 2'


def test_an_async_function_has_a_stub_of_its_own_name() -> None:
    cell = "def f():\n    pass\n\n\nasync def g(x):\n    # BEGIN SOLUTION\n    return x\n    # END SOLUTION"
    assert with_stubs(cell, "9.1").endswith('async def g(x):\n    raise NotImplementedError("Exercise 9.1: g")')
