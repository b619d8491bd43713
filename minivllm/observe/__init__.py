"""The microscope: what each step of an engine did, and pictures of it. Built in no lab, used in all from Lab 05 on.

    LLM(trace=True)  ->  recorder.py  ->  llm.trace  ->  timeline.py (figures), widgets.py (a scrubber), perfetto.py (a file)

`trace.py` is the data and may not know torch or matplotlib; the others draw from the data alone, also from a saved file.
"""
