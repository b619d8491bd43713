# expect: passed
from minivllm.core.step import FinishReason


class Scheduler:
    def finish_reason(self, request, token_id):
        if token_id in request.stop_eos_ids | request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(request.output_token_ids) == request.max_tokens else None
