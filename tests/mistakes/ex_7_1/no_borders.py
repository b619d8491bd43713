# expect: without borders, they look alike
import hashlib


def hash_block(parent, tokens, extra=()):
    text = str(parent) + "".join(map(str, tokens)) + repr(extra)
    return hashlib.sha256(text.encode()).digest()
