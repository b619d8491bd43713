# expect: should hold the value of token 0, and holds what was there before
import torch


def write_kv(key, value, kv_cache, slot_mapping):
    kv_cache.flatten(1, 2)[0, slot_mapping] = key
