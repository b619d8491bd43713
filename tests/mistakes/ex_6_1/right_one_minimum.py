# expect: passed
from minivllm.core.scheduler import Scheduler as Base


class Scheduler(Base):
    def num_new_tokens(self, request, budget, num_cached_tokens):
        computed = request.num_computed_tokens + num_cached_tokens
        if self.chunked_prefill is False and request.num_tokens - computed > budget:
            return 0
        limits = [request.num_tokens_with_spec + request.num_output_placeholders - computed]
        limits += [budget, self.max_model_len - computed - 1]
        if self.long_prefill_token_threshold and len(self.requests) >= 2:
            limits.append(self.long_prefill_token_threshold)
        return min(limits)
