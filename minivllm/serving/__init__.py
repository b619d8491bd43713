"""Serving: the engine behind HTTP, as a tree of processes. Lab 11 builds the routing of outputs (`async_llm.py`).

    clients == HTTP ==> front end: api_server -> AsyncLLM (tokenizer, detokenizer, one queue per request)    never imports torch
                                                  |  ^
                              EngineCoreRequest   v  |  EngineCoreOutput       ZeroMQ sockets, msgspec messages (`wire.py`)
                                        engine core: scheduler, KV cache, weights (`engine_process.py`)      never speaks HTTP

Two processes, because Python runs one thread at a time: while the front end parses JSON, the step loop goes on.
"""
