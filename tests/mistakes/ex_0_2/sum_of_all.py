# expect: at the same time
def step_time(flops, bytes, launches, device):
    return flops / device.flops + bytes / device.bandwidth + launches * device.launch_overhead
