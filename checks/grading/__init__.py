"""Grading and handing out, for instructors. INSTRUCTORS.md has the whole of it.

run.py       a whole class: finds what was handed in, rebuilds each notebook, has each exercise checked behind walls
one.py       one notebook of it
    submissions.py   whose file it is, and which lab       rebuild.py    the official lab with the student's answers in it
    points.py        exercises, public and hidden          questions.py  quizzes          copying.py  is it their own?
    trees.py         minivllm without an answer            isolation.py  the walls (checks/sandbox/jail.py builds them)
    nbval_run.py     the rebuilt notebook as a whole       container.py  the same in a container
records.py   what grading finds out, as data: one file a student and lab; everything below is computed from these files alone
book.py      the class as one table: roster, records and the instructor's overrides put together
outputs.py   writes what is handed on: gradebook, Canvas and Moodle files, feedback, JUnit, the class report, incidents
release.py   the student folder;  nbgrader_export.py   the same labs as an nbgrader course
"""
