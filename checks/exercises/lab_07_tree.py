"""Exercise 7.4: matching a prefix in a radix tree. Cases and judge, in the parent only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.lab_07_lookup import _judge_list

# A node is [letters, block ids, children]: one letter, one block. The key of the block of letter "a" is ((), (97, 97)).
Node = list[Any]


def match_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"7.4:{seed}")
    line: list[Node] = [["abc", [1, 2, 3], []]]
    fork: list[Node] = [["ab", [7, 3], [["ij", [9, 4], []], ["wx", [2, 8], []]]], ["q", [5], []]]
    deep: list[Node] = [["a", [1], [["b", [2], [["c", [3], [["d", [4], []]]]]], ["ca", [6, 7], []]]]]
    by_hand = [
        ([], "ab"),
        (line, ""),
        (line, "abc"),
        (line, "abcd"),
        (line, "ab"),
        (line, "abx"),
        (line, "axc"),
        (line, "xbc"),
        (line, "bc"),
        (fork, "abij"),
        (fork, "abwx"),
        (fork, "abw"),
        (fork, "abwj"),
        (fork, "abq"),
        (fork, "awx"),
        (fork, "ab"),
        (fork, "q"),
        (fork, "qab"),
        (deep, "abcd"),
        (deep, "abcde"),
        (deep, "acab"),
        (deep, "acb"),
        (deep, "abd"),
    ]
    cases = [_case(tree, text) for tree, text in by_hand]
    most = 200 if scale == 1 else 5000  # block ids: three children a node are 1,092 nodes of up to four at a depth of 6
    for _ in range(6):
        tree = _random_tree(rng, iter(rng.sample(range(1, most), most - 1)), depth=4 if scale == 1 else 6)
        paths = [path for path, _ in _paths(tree)]
        text = rng.choice(paths)
        cases.append(_case(tree, text[: rng.randint(1, len(text))] + "".join(rng.choices("abc", k=rng.randint(0, 2)))))
    return cases


def _random_tree(rng: random.Random, ids: Iterator[int], depth: int) -> list[Node]:
    nodes = []
    for first in rng.sample("abc", rng.randint(1, 3)):
        text = first + "".join(rng.choices("abc", k=rng.randint(0, 3)))
        children = _random_tree(rng, ids, depth - 1) if depth > 1 and rng.random() < 0.6 else []
        nodes.append([text, [next(ids) for _ in text], children])
    return nodes


def _paths(nodes: list[Node], before: str = "", blocks: tuple[int, ...] = ()) -> Iterator[tuple[str, list[int]]]:
    """Every path from the root to the end of a node, and its blocks."""
    for text, ids, children in nodes:
        yield before + text, [*blocks, *ids]
        yield from _paths(children, before + text, (*blocks, *ids))


def _case(tree: list[Node], text: str) -> Case:
    return {"tree": tree, "keys": text, "call": f'match_prefix(keys of "{text}") in the tree {_show_tree(tree)}'}


def _show_tree(nodes: list[Node]) -> str:
    def show(node: Node) -> str:
        text, ids, children = node
        return f"[{text}: {' '.join(map(str, ids))}]" + (f" -> ({', '.join(map(show, children))})" if children else "")

    shown = ", ".join(map(show, nodes))
    return f"root -> ({shown})" if len(shown) < 160 else f"root -> ({shown[:150]} ...)"


def judge_match(case: Case, output: Any) -> Verdict:
    wanted: list[int] = []
    for path, blocks in _paths(case["tree"]):
        n = next(
            (i for i, (a, b) in enumerate(zip(path, case["keys"], strict=False)) if a != b), min(len(path), len(case["keys"]))
        )
        wanted = max(wanted, blocks[:n], key=len)
    returned = output["returned"]
    if wrong := _judge_list(returned, source="that the nodes hold (node.blocks)"):
        return wrong
    if returned != wanted:
        why = _why_match(case, returned, wanted)
        return Verdict("wrong value", f"It returned blocks {returned}, and should return {wanted}.{why}")
    if output["changed"]:
        return Verdict(
            "input changed", f"The blocks are right, but {output['changed']} was changed. A lookup leaves the tree alone."
        )
    return RIGHT


def _why_match(case: Case, returned: list[int], wanted: list[int]) -> str:
    keys = case["keys"]
    letters = {block: letter for path, blocks in _paths(case["tree"]) for letter, block in zip(path, blocks, strict=True)}
    if len(returned) > len(wanted) and returned[: len(wanted)] == wanted:
        if len(wanted) == len(keys):
            return f" There are only {len(keys)} keys: what the node holds beyond them is another text."
        key = keys[len(wanted)]
        if letters.get(returned[len(wanted)]) == key:
            return " The match ends inside a node. Its children come after the whole of it."
        return f" Key {len(wanted)} is {key!r}, and the block taken for it holds another: compare every key of a node."
    if wanted[: len(returned)] == returned:
        inside = all(len(returned) != len(blocks) for _, blocks in _paths(case["tree"])) and returned
        if inside:
            return " The rest of that node fits too."
        return " A part of a node is a match too, and behind a node that fits its children are asked for the next key."
    return ""
