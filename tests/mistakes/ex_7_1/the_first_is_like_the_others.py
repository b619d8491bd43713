# expect: the parent belongs into the name
import hashlib

last = b""


def hash_block(parent, tokens, extra=()):
    parent = parent if parent is None else parent[:0]
    return hashlib.sha256(repr((parent is None, tokens, extra)).encode()).digest()
