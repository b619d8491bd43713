# expect: multiplied
def step_time(flops, bytes, launches, device):
    return max(flops * device.flops, bytes * device.bandwidth) + launches * device.launch_overhead
