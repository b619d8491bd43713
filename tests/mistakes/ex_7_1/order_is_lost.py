# expect: in another order are another text
import hashlib


def hash_block(parent, tokens, extra=()):
    return hashlib.sha256(repr((parent, sorted(tokens), extra)).encode()).digest()
