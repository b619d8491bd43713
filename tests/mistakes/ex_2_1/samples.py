# expect: The next token is the argmax of the last row
import torch


def greedy_generate(model, token_ids, max_new_tokens):
    tokens = list(token_ids)
    for _ in range(max_new_tokens):
        probs = model(torch.tensor(tokens))[-1].softmax(-1)
        tokens.append(int(torch.multinomial(probs, 1)))
    return tokens[len(token_ids) :]
