# expect: passed
import hashlib


def hash_block(parent, tokens, extra=()):
    digest = hashlib.sha1(parent if parent else bytes(20))
    for token in tokens:
        digest.update(token.to_bytes(4, "big"))
    for text in (text.encode() for pair in extra for text in pair):
        digest.update(len(text).to_bytes(4, "big") + text)
    return digest.digest()
