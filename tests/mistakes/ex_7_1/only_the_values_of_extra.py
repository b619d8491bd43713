# expect: one tenant would find the other's block
import hashlib
from array import array


def hash_block(parent, tokens, extra=()):
    digest = hashlib.sha256(parent or b"")
    digest.update(array("q", tokens).tobytes())
    for _, value in extra:
        digest.update(value.encode())
    return digest.digest()
