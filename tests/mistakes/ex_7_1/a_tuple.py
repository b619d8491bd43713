# expect: holds the whole past
def hash_block(parent, tokens, extra=()):
    return parent, tuple(tokens), extra
