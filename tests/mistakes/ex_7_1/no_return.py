# expect: Is a `return` missing?
import hashlib


def hash_block(parent, tokens, extra=()):
    hashlib.sha256(repr((parent, tokens, extra)).encode()).digest()
