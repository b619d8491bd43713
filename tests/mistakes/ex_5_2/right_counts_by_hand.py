# expect: passed
from minivllm.core.scheduler import Scheduler as Given
from minivllm.core.step import FinishReason


class Scheduler(Given):
    def finish_reason(self, request, token_id):
        reason = None
        if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
            reason = FinishReason.LENGTH
        for ends in (request.stop_eos_ids, request.stop_token_ids):
            if token_id in ends:
                reason = FinishReason.STOP
        return reason
