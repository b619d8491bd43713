# expect: request.num_tokens counts them
import minivllm.core.scheduler


class Scheduler(minivllm.core.scheduler.Scheduler):
    def num_new_tokens(self, request, budget, num_cached_tokens=0):
        num_computed = request.num_computed_tokens + num_cached_tokens
        n = request.num_tokens_with_spec + request.num_output_placeholders - num_computed
        if 0 < self.long_prefill_token_threshold < request.num_prompt_tokens - num_computed and len(self.requests) > 1:
            n = self.long_prefill_token_threshold
        n = min(n, self.max_model_len - 1 - num_computed)
        if not self.chunked_prefill and request.num_tokens - num_computed > budget:
            return 0
        return min(n, budget)
