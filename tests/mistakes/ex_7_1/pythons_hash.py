# expect: can be forced to collide
def hash_block(parent, tokens, extra=()):
    return hash((parent, tuple(tokens), extra))
