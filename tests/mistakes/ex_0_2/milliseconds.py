# expect: milliseconds
def step_time(flops, bytes, launches, device):
    return 1e3 * (max(flops / device.flops, bytes / device.bandwidth) + launches * device.launch_overhead)
