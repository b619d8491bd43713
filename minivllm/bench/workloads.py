"""Seeded workloads, the same on every machine, and their files. Run by labs from 05 on and by `minivllm bench`. Pure Python.

    make("chat", n=4, turns=3, seed=0, rate=2.0)  ->  Workload  ->  save(path), replay(llm, workload), llm.generate(...)

    name             what it is                                                      n counts        prompts are
    fixed            equal lengths                                                   requests        random token ids
    uniform          W(n) of the README's tables: 32-256 in, 32-128 out              requests        random token ids
    mixed            a few long prompts among short ones                             requests        random token ids
    no_sharing       no two prompts have a common beginning                          requests        random token ids
    few_shot         one preamble of solved cases, then a question each              requests        text
    chat             conversations; each turn's prompt extends the last one          conversations   text
    tree_of_thought  every step of a solution is continued in several ways           trees           text
    long_document    a text, and several questions about it                          documents       text

`group` names what shares a prefix, `turn` what must come after what: a request of turn 2 is sent when those of turn 1 of its
group have ended, and not before its arrival. Answers inside a conversation are recorded ones, so that a prompt never depends on
a model. `rate` is the arrivals a second, with exponential gaps (Poisson); None lets everything arrive at once.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from minivllm.bench import material

# Ids below this are special tokens in the models we use (SmolLM2 has 17 of them), so random prompts keep clear.
FIRST_PLAIN_TOKEN = 100
DEFAULT_VOCAB_SIZE = 49152  # SmolLM2's

FORMAT = "minivllm-workload"
VERSION = 1

DEMO_PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about a very fast turtle.",
    "Give me three tips for learning a new programming language.",
    "What is the difference between a process and a thread?",
    "Tell a short story that begins with: The lighthouse went dark.",
    "List five fruits and one thing to cook with each.",
    "How does a refrigerator keep food cold?",
    "Write a polite email asking a colleague to review my code.",
)


@dataclass(frozen=True)
class BenchRequest:
    """One request of a workload: prompt token ids, and how many output tokens to generate (end tokens ignored)."""

    prompt_token_ids: list[int]
    output_len: int


def uniform(
    num_prompts: int,
    *,
    vocab_size: int,
    seed: int = 0,
    prompt_len: tuple[int, int] = (32, 256),
    output_len: tuple[int, int] = (32, 128),
) -> list[BenchRequest]:
    """W(n): lengths drawn uniformly from closed ranges, then random tokens. The lengths depend on the seed and n alone, so
    models of different vocabularies get the same amount of work."""
    if num_prompts < 1:
        raise ValueError(f"num_prompts must be at least 1, got {num_prompts}.")
    rng = random.Random(seed)
    sizes = [(rng.randint(*prompt_len), rng.randint(*output_len)) for _ in range(num_prompts)]
    return [BenchRequest([rng.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(p)], o) for p, o in sizes]


@dataclass(slots=True)
class WorkloadRequest:
    """One request: a text or token ids (one of the two is set, both after `Workload.encoded`), how many tokens to generate, and
    when it arrives, in seconds from the start."""

    prompt: str | None
    prompt_token_ids: list[int] | None
    max_tokens: int
    arrival_s: float = 0.0
    group: str = ""
    turn: int = 0

    def as_prompt(self) -> str | dict[str, Any]:
        """What `LLM.generate` takes."""
        if self.prompt_token_ids is None:
            assert self.prompt is not None
            return self.prompt
        return {"prompt": self.prompt, "prompt_token_ids": self.prompt_token_ids}


@dataclass(slots=True)
class Workload:
    """Requests in the order of their arrival, with the name and seed they were made from."""

    name: str
    seed: int
    requests: list[WorkloadRequest] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.requests)

    def prompts(self) -> list[str | dict[str, Any]]:
        """For `LLM.generate`, all at once."""
        return [request.as_prompt() for request in self.requests]

    def encoded(self, encode: Callable[[str], list[int]]) -> Workload:
        """A copy with token ids for every text: `llm.tokenizer.encode`, or `word_ids` for a model without a tokenizer."""
        requests = [
            r if r.prompt is None or r.prompt_token_ids is not None else replace(r, prompt_token_ids=encode(r.prompt))
            for r in self.requests
        ]
        return Workload(self.name, self.seed, requests)

    def save(self, path: str | Path) -> None:
        """Write as JSON lines: what it is, then a line a request."""
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            head = {"format": FORMAT, "version": VERSION, "name": self.name, "seed": self.seed}
            for line in (head, *map(asdict, self.requests)):
                file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Read what `save` wrote. Raises ValueError naming the file and line if it is something else."""
        workload: Workload | None = None
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    entry = json.loads(line)
                    if workload is not None:
                        workload.requests.append(_checked(WorkloadRequest(**entry)))
                        continue
                    if (entry.get("format"), entry.get("version")) != (FORMAT, VERSION):
                        raise ValueError(f"the first line must say format {FORMAT!r}, version {VERSION}")
                    workload = cls(entry["name"], entry["seed"])
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                    raise ValueError(f"{path}, line {number} is not a line of a workload: {error}.") from error
        if workload is None:
            raise ValueError(f"{path} is empty: a workload has at least its first line.")
        return workload


def load(path: str | Path) -> Workload:
    """`Workload.load`."""
    return Workload.load(path)


def word_ids(text: str, vocab_size: int = DEFAULT_VOCAB_SIZE) -> list[int]:
    """One token a word, for models without a tokenizer (the echo model): the same word is the same id, and a text that begins
    with another has ids that begin with the other's."""
    low = FIRST_PLAIN_TOKEN if vocab_size > 2 * FIRST_PLAIN_TOKEN else 0

    def word_id(word: str) -> int:
        return low + int.from_bytes(hashlib.blake2b(word.encode(), digest_size=4).digest(), "little") % (vocab_size - low)

    return [word_id(word) for word in text.split()]


# ---------------------------------------------------------------------- making them


def make(name: str, n: int = 8, *, seed: int = 0, rate: float | None = None, **params: Any) -> Workload:
    """The workload `name` of size n (what n counts is in this file's table). `params` are those of its function below.
    Raises ValueError for a name or parameter that does not exist, with those that do."""
    maker = _MAKERS.get(name)
    if maker is None:
        raise ValueError(f"There is no workload {name!r}. There are: {', '.join(_MAKERS)}.")
    known = [p for p in inspect.signature(maker).parameters if p not in ("n", "seed")]
    if unknown := [p for p in params if p not in known]:
        raise ValueError(f"Workload {name!r} has no parameter {unknown[0]!r}. It has: seed, rate, {', '.join(known)}.")
    for what, value in {"n": n, **params}.items():
        _check_size(what, value)
    workload = Workload(name, seed, maker(n, seed, **params))
    if rate is not None:
        _arrive(workload, rate)
    return workload


def fixed(
    n: int, seed: int, prompt_len: int = 128, max_tokens: int = 64, vocab_size: int = DEFAULT_VOCAB_SIZE
) -> list[WorkloadRequest]:
    """n prompts of `prompt_len` random tokens, each followed by `max_tokens`."""
    rng = random.Random(seed)
    return [WorkloadRequest(None, _random_ids(rng, prompt_len, vocab_size), max_tokens, group=f"{i}") for i in range(n)]


def uniform_requests(
    n: int,
    seed: int,
    prompt_len: tuple[int, int] = (32, 256),
    output_len: tuple[int, int] = (32, 128),
    vocab_size: int = DEFAULT_VOCAB_SIZE,
) -> list[WorkloadRequest]:
    """`uniform`, with the same numbers."""
    work = uniform(n, vocab_size=vocab_size, seed=seed, prompt_len=prompt_len, output_len=output_len)
    return [WorkloadRequest(None, r.prompt_token_ids, r.output_len, group=f"{i}") for i, r in enumerate(work)]


def mixed(
    n: int,
    seed: int,
    long_share: float = 0.2,
    short_len: tuple[int, int] = (16, 64),
    long_len: tuple[int, int] = (512, 1024),
    output_len: tuple[int, int] = (16, 64),
    vocab_size: int = DEFAULT_VOCAB_SIZE,
) -> list[WorkloadRequest]:
    """A share of long prompts among short ones, in a drawn order; at least one of each if n allows it. `group` says which."""
    if not 0 <= long_share <= 1:
        raise ValueError(f"long_share must be between 0 and 1, got {long_share}.")
    rng = random.Random(seed)
    num_long = round(n * long_share)
    if n > 1 and 0 < long_share < 1:
        num_long = min(max(num_long, 1), n - 1)
    kinds = ["long"] * num_long + ["short"] * (n - num_long)
    rng.shuffle(kinds)
    requests = []
    for kind in kinds:
        length = rng.randint(*(long_len if kind == "long" else short_len))
        requests.append(WorkloadRequest(None, _random_ids(rng, length, vocab_size), rng.randint(*output_len), group=kind))
    return requests


def no_sharing(
    n: int, seed: int, prompt_len: int = 128, max_tokens: int = 32, vocab_size: int = DEFAULT_VOCAB_SIZE
) -> list[WorkloadRequest]:
    """Random prompts of which no two begin with the same token: a prefix cache can find nothing, however small its blocks."""
    rng = random.Random(seed)
    num_ids = vocab_size - FIRST_PLAIN_TOKEN
    if n > num_ids:
        raise ValueError(f"n={n} prompts cannot begin differently with {num_ids} token ids. Lower n or raise vocab_size.")
    firsts = rng.sample(range(FIRST_PLAIN_TOKEN, max(vocab_size, FIRST_PLAIN_TOKEN)), n)
    return [
        WorkloadRequest(None, [first, *_random_ids(rng, prompt_len - 1, vocab_size)], max_tokens, group=f"{i}")
        for i, first in enumerate(firsts)
    ]


def few_shot(
    n: int, seed: int, shots: int = 6, system_words: int = 60, max_tokens: int = 8, num_tasks: int = 1
) -> list[WorkloadRequest]:
    """n questions, all after the same instruction and solved cases (one such preamble a task, three tasks at most)."""
    rng = random.Random(seed)
    names = list(material.TASKS)
    _limit("num_tasks", num_tasks, len(names))
    preambles, open_cases = {}, {}
    for name in names[:num_tasks]:
        instruction, cases = material.TASKS[name]
        _limit("shots", shots, len(cases) - 1)
        order = rng.sample(cases, len(cases))
        solved = "\n\n".join(f"Input {k}: {given}\nAnswer {k}: {answer}" for k, (given, answer) in enumerate(order[:shots], 1))
        preambles[name] = f"{_prose(rng, system_words)}\n\n{instruction}\n\n{solved}\n\n"
        open_cases[name] = order[shots:]
    requests = []
    for i in range(n):
        name = names[i % num_tasks]
        number, (given, _) = shots + 1 + i, rng.choice(open_cases[name])  # the number keeps equal questions apart
        prompt = f"{preambles[name]}Input {number}: {given}\nAnswer {number}:"
        requests.append(WorkloadRequest(prompt, None, max_tokens, group=name))
    return requests


def chat(
    n: int, seed: int, turns: int = 3, system_words: int = 40, answer_words: int = 40, max_tokens: int = 32
) -> list[WorkloadRequest]:
    """n conversations of `turns` turns after one system prompt. Turn k's prompt is turn k-1's, its recorded answer, and the
    next question. Conversations come turn by turn: all first turns, then all second ones."""
    rng = random.Random(seed)
    system = f"{rng.choice(material.SYSTEM_PROMPTS)} {_prose(rng, system_words)}".strip()
    requests: list[WorkloadRequest] = []
    for i in range(n):
        topic = rng.choice(list(material.SENTENCES))
        question = rng.choice(material.QUESTIONS).format(topic=topic)
        prompt = f"System: {system}\n\nUser: Conversation {i + 1}. {question}\nAssistant:"
        for turn in range(turns):
            requests.append(WorkloadRequest(prompt, None, max_tokens, group=f"chat-{i + 1}", turn=turn))
            follow_up = rng.choice(material.FOLLOW_UPS).format(topic=rng.choice(list(material.SENTENCES)))
            prompt += f" {_prose(rng, answer_words, topic)}\nUser: {follow_up}\nAssistant:"
    return sorted(requests, key=lambda request: request.turn)  # stable: conversations keep their order


def tree_of_thought(
    n: int, seed: int, branches: int = 3, depth: int = 2, thought_words: int = 30, max_tokens: int = 24
) -> list[WorkloadRequest]:
    """n problems, each solved step by step in a tree: a node's prompt is its parent's and one more thought, and every node has
    `branches` children, `depth` levels down. A level waits for the one above it: that is how such a search runs."""
    rng = random.Random(seed)
    requests: list[WorkloadRequest] = []
    for i in range(n):
        problem = material.PROBLEMS[i % len(material.PROBLEMS)]
        level = [f"Problem {i + 1}: {problem} Think step by step and finish with the answer.\n"]
        for turn in range(depth + 1):
            requests += [WorkloadRequest(prompt, None, max_tokens, group=f"tree-{i + 1}", turn=turn) for prompt in level]
            thoughts = material.FIRST_THOUGHTS if turn == 0 else material.LATER_THOUGHTS
            level = [
                f"{prompt}Step {turn + 1}, idea {branch + 1}: {rng.choice(thoughts)} {_prose(rng, thought_words)}\n"
                for prompt in level
                for branch in range(branches)
            ]
    return sorted(requests, key=lambda request: request.turn)


def long_document(n: int, seed: int, doc_words: int = 600, questions: int = 4, max_tokens: int = 32) -> list[WorkloadRequest]:
    """n documents of about `doc_words` words and several questions about each, the document first. The questions about
    different documents take turns, as different people's would."""
    rng = random.Random(seed)
    _limit("questions", questions, len(material.QUESTIONS))
    requests: list[WorkloadRequest] = []
    topics = list(material.SENTENCES)
    documents = [f"Document {i + 1}: {_prose(rng, doc_words)}" for i in range(n)]
    asked = [rng.sample(material.QUESTIONS, questions) for _ in range(n)]
    for k in range(questions):
        for i, document in enumerate(documents):
            question = asked[i][k].format(topic=rng.choice(topics))
            requests.append(
                WorkloadRequest(f"{document}\n\nQuestion: {question}\nAnswer:", None, max_tokens, group=f"doc-{i + 1}")
            )
    return requests


_MAKERS: dict[str, Callable[..., list[WorkloadRequest]]] = {
    "fixed": fixed,
    "uniform": uniform_requests,
    "chat": chat,
    "few_shot": few_shot,
    "tree_of_thought": tree_of_thought,
    "long_document": long_document,
    "mixed": mixed,
    "no_sharing": no_sharing,
}
NAMES = tuple(_MAKERS)


# ---------------------------------------------------------------------- their parts


def _prose(rng: random.Random, num_words: int, topic: str | None = None) -> str:
    """Whole sentences, about so many words: of one topic from a drawn sentence on, or a stretch of one topic after another."""
    said: list[str] = []
    words = 0
    for sentence in _sentences(rng, topic):
        if words >= num_words:
            return " ".join(said)
        said.append(sentence)
        words += len(sentence.split())
    raise AssertionError("_sentences never ends")


def _sentences(rng: random.Random, topic: str | None) -> Iterator[str]:
    topics = [topic] if topic else rng.sample(list(material.SENTENCES), len(material.SENTENCES))
    for name in itertools.cycle(topics):
        sentences = material.SENTENCES[name]
        start, length = rng.randrange(len(sentences)), len(sentences) if topic else rng.randint(3, 6)
        yield from (sentences[(start + i) % len(sentences)] for i in range(length))


def _random_ids(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    if vocab_size <= FIRST_PLAIN_TOKEN:
        raise ValueError(f"vocab_size={vocab_size} is too small: random prompts are drawn from {FIRST_PLAIN_TOKEN} on.")
    return [rng.randrange(FIRST_PLAIN_TOKEN, vocab_size) for _ in range(length)]


def _arrive(workload: Workload, rate: float) -> None:
    """Poisson arrivals of the first turns, in their order; later turns arrive with their group's first one, and then wait for
    the turn before. Drawn apart from the prompts: another rate gives the same texts. The gaps scale with 1 / rate."""
    if not isinstance(rate, (int, float)) or isinstance(rate, bool) or not 0 < rate < math.inf:
        raise ValueError(f"rate must be a positive number of arrivals a second, got {rate!r}. None lets all arrive at once.")
    rng = random.Random(f"arrivals/{workload.seed}")
    now = 0.0
    of_group: dict[str, float] = {}
    for request in workload.requests:
        if request.turn == 0:
            now += rng.expovariate(1.0) / rate
            of_group.setdefault(request.group, now)
            request.arrival_s = now
        else:
            request.arrival_s = of_group[request.group]
    workload.requests.sort(key=lambda request: request.arrival_s)


def _check_size(name: str, value: Any) -> None:
    """Sizes are whole numbers of at least 1, ranges of them (low, high); shares are checked where they are used."""
    if name.endswith("share"):
        return
    low = 0 if name.endswith("words") or name in ("shots", "depth") else 1
    sizes: Iterable[Any] = value if isinstance(value, (tuple, list)) else (value,)
    numbers = list(sizes)
    if not all(isinstance(size, int) and not isinstance(size, bool) and size >= low for size in numbers):
        raise ValueError(f"{name} must be an integer of at least {low} (or a range of two), got {value!r}.")
    if isinstance(value, (tuple, list)) and (len(numbers) != 2 or numbers[0] > numbers[1]):
        raise ValueError(f"{name} must be a range (low, high) with low <= high, got {value!r}.")


def _limit(name: str, value: int, most: int) -> None:
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}: there is no more material.")


def _checked(request: WorkloadRequest) -> WorkloadRequest:
    if request.prompt is None and request.prompt_token_ids is None:
        raise ValueError("a request needs a prompt or prompt_token_ids")
    return request
