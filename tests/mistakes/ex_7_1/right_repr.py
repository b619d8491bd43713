# expect: passed
import hashlib


def hash_block(parent, tokens, extra=()):
    return hashlib.sha256(repr((parent, list(tokens), extra)).encode()).digest()
