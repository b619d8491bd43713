# expect: passed
import numpy as np


def step_time(flops, bytes, launches, device):
    return np.max([flops / device.flops, bytes / device.bandwidth]) + launches * device.launch_overhead
