"""Runs a student's cell in a process of its own, which can be killed. Knows nothing of exercises: it is given source, cases and
the name of a `run` function, and gives back what `run` returned, as plain data.

    sandbox.py      the parent's side: one job = one child, its limits, its end
    forkserver.py   the process the children are forked from (torch already imported; it never touches CUDA)
    child.py        the child's side: compile the cell as a module by itself, run the cases
    plain.py        the only things that cross the line: JSON, and tensors as bytes; nothing is ever unpickled
"""
