"""Speculative decoding: cheap guesses of the next tokens (drafts), which the target model verifies several at a time."""
