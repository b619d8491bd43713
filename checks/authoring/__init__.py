"""How labs are made: one source (solutions/NN_slug.py, jupytext's percent format), two notebooks.

source.py     reads the source, and fills in answers from the engine
build.py      writes solutions/NN_slug.ipynb and labs/NN_slug.ipynb, runs the former
validate.py   what a lab must have, and what must not be in it
"""
