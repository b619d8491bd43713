"""The microscope: what each step of an engine did, and pictures of it. Built in no lab; Labs 05 to 07 look through it.

    LLM(trace=True)  ->  recorder.py  ->  llm.trace  ->  timeline.py (figures), widgets.py (a scrubber), perfetto.py (a file)

`trace.py` is the data and may not know torch or matplotlib; the others draw from the data alone, also from a saved file.
"""
