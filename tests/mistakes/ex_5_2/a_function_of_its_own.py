# expect: finish_reason
from minivllm.core.step import FinishReason


def finish_reason(request, token_id):
    return FinishReason.STOP if token_id in request.stop_eos_ids else None
