"""Lab 08, beside the student's code: runs in the child, and knows no answer. lab_08.py judges what comes back.

Without a GPU kernels run in Triton's interpreter, with one they are compiled and run for real. All memory a kernel is given
lies in the middle of more, so that a wrong address finds NaN, and not the end of the process.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import re
import textwrap
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch

from checks.exercises import Case
from checks.sandbox.cell import remember_text

ROWS, TILE = 16, 16  # the smallest that tl.dot takes on a GPU
LOG2_E = 1.4426950408889634
NO_WINDOW = 1 << 30
GUARD = 4096  # numbers on both sides of a tensor


def prepare(exercise: str) -> None:
    """Before the cell is loaded: Triton decides once, when it is imported, whether it interprets."""
    if exercise in COMPILED:
        os.environ["TRITON_INTERPRET"] = "0"
        from minivllm.attention.triton_compile import launches_held_back

        _held_back.enter_context(launches_held_back())
    elif exercise != "8.2" and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


_held_back = contextlib.ExitStack()  # for as long as this process lives: a cell may launch its kernels itself


def why_not_here(exercise: str) -> str | None:
    """Why a kernel cannot run in the notebook's own process, which does not interpret."""
    if exercise == "8.2" or interpreting() or torch.cuda.is_available():
        return None
    return (
        "cannot be run in this kernel: without a GPU Triton interprets, which it decides when it is imported. Take here=True"
        " away, and put print(x) into your function: the check shows what it prints."
    )


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class Buffer:
    """A tensor with NaN (or, of block numbers, ones) around it."""

    def __init__(self, name: str, content: torch.Tensor) -> None:
        device = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
        around = 1 if content.dtype == torch.int32 else float("nan")
        self.whole = torch.full((content.numel() + 2 * GUARD,), around, dtype=content.dtype, device=device)
        self.name, self.tensor = name, self.whole[GUARD:-GUARD].view(content.shape)
        self.tensor.copy_(content)

    def holds(self, address: int) -> bool:
        return 0 <= address - self.whole.data_ptr() < self.whole.numel() * self.whole.element_size()

    def offset(self, address: int) -> int:
        return (address - self.tensor.data_ptr()) // self.tensor.element_size()


@contextlib.contextmanager
def recorded() -> Iterator[list[Any]]:
    """The loads and stores of interpreted kernels; of compiled ones nothing is known."""
    if not interpreting():
        yield []
        return
    from minivllm.attention.triton_trace import recording

    try:
        with recording(garbage=True) as accesses:
            yield accesses
    except Exception as error:
        _explain(error)
        raise


_SHAPES = (
    "Sizes in tl.arange, tl.zeros and tl.full are numbers known when the kernel is compiled: arguments with `: tl.constexpr`"
    " behind their name, or numbers you write"
)
_EXPLAINED = {
    "must have type `constexpr": f"{_SHAPES}; not what was loaded, computed, or given as n",
    "must be of type tl.constexpr": f"{_SHAPES}; not what was loaded, computed, or given as n",
    "operands must be same dtype": "tl.dot takes two of one type: weights_RK.to(v_KD.dtype)",
    "must be a power of 2": f"{_SHAPES}, and powers of two: take the constexpr that is one (BLOCK, TILE, D, P), and mask",
}


def _explain(error: BaseException) -> None:
    """What Triton says of shapes, with what to do about it."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = str(error)
    for words, why in _EXPLAINED.items():
        if words in said:
            error.args = (f"{said}. {why}.",)


def boolean_words(module: ModuleType, name: str) -> bool:
    """Whether a kernel joins conditions with `and` or `or` (outside of `if` and `while`)."""
    kernel = getattr(module, name)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kernel.fn)))
    except (OSError, TypeError, SyntaxError):
        return False
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert)]
    inside = {id(node) for test in tests for node in ast.walk(test)}
    return any(isinstance(node, ast.BoolOp) and id(node) not in inside for node in ast.walk(tree))


Allowed = Mapping[str, Container[int]]  # "read x", "write out": the offsets


def stray(accesses: list[Any], buffers: list[Buffer], allowed_of: Callable[[int], Allowed]) -> list[Any] | None:
    """The first access to a number that the program has no business with: [program, whether it writes, name, offset]."""
    for access in accesses:
        allowed = allowed_of(access.program[0])
        for address in map(int, access.addresses):
            buffer = next((b for b in buffers if b.holds(address)), None)
            if buffer is None:
                return [access.program[0], access.is_store, None, 0]
            key = f"{'write' if access.is_store else 'read'} {buffer.name}"
            if buffer.offset(address) not in allowed.get(key, ()):
                return [access.program[0], access.is_store, buffer.name, buffer.offset(address)]
    return None


def no_kernel(module: ModuleType, *names: str) -> dict[str, Any] | None:
    """An answer that says so if one of these functions has no @triton.jit."""
    missing = [name for name in names if not hasattr(getattr(module, name), "fn")]
    return {"plain": missing[0]} if missing else None


# ------------------------------------------------------------------------------------------------------- 8.1 first kernels


def run_first(module: ModuleType, case: Case) -> dict[str, Any]:
    return run_add(module, case) if case["kernel"] == "add" else run_gather(module, case)


def run_add(module: ModuleType, case: Case) -> dict[str, Any]:
    if plain := no_kernel(module, "add_kernel"):
        return plain
    n, block = case["n"], case["BLOCK"]
    x, y = Buffer("x", torch.arange(n) + 1.0), Buffer("y", 100.0 * (torch.arange(n) + 1))
    out = Buffer("out", torch.full((n,), -1.0))
    numbers = set(range(n))
    with recorded() as accesses:
        module.add_kernel[(-(-n // block),)](out.tensor, x.tensor, y.tensor, n, BLOCK=block)
    allowed = {"read x": numbers, "read y": numbers, "write out": numbers}

    def own(program: int) -> Allowed:
        return dict.fromkeys(allowed, range(program * block, (program + 1) * block))

    around = torch.cat([out.whole[:GUARD], out.whole[-GUARD:]])
    return {
        "out": out.tensor.cpu(),
        "around": bool(around.isnan().all()),
        "changed": [b.name for b, first in ((x, 1.0), (y, 100.0)) if float(b.tensor[0]) != first],
        "stray": stray(accesses, [x, y, out], lambda program: allowed),
        "foreign": stray(accesses, [x, y, out], own),
        "and": boolean_words(module, "add_kernel"),
    }


def gather_cache(case: Case) -> torch.Tensor:
    """[num_blocks, BLOCK_SIZE, WIDTH]: slot 7 holds 7.00, 7.01, ... if a token is there, else 1007.00, 1007.01, ..."""
    slots = torch.arange(case["num_blocks"] * case["BLOCK_SIZE"], dtype=torch.float32)
    cache = (slots[:, None] + torch.arange(case["WIDTH"]) / 100).view(case["num_blocks"], case["BLOCK_SIZE"], case["WIDTH"])
    there = torch.zeros(len(slots), dtype=torch.bool)
    there[slots_of(case)] = True
    cache[~there.view(case["num_blocks"], -1)] += 1000
    return cache


def slots_of(case: Case) -> list[int]:
    size = case["BLOCK_SIZE"]
    return [case["block_table"][p // size] * size + p % size for p in range(case["seq_len"])]


def run_gather(module: ModuleType, case: Case) -> dict[str, Any]:
    if plain := no_kernel(module, "gather_kernel"):
        return plain
    seq_len, size, width, tile = case["seq_len"], case["BLOCK_SIZE"], case["WIDTH"], case["TILE"]
    table = Buffer("block_table", torch.tensor(case["block_table"], dtype=torch.int32))
    cache, out = Buffer("cache", gather_cache(case)), Buffer("out", torch.full((seq_len, width), -1.0))
    with recorded() as accesses:
        module.gather_kernel[(-(-seq_len // tile),)](
            out.tensor, cache.tensor, table.tensor, seq_len, BLOCK_SIZE=size, WIDTH=width, TILE=tile
        )
    allowed = {
        "read block_table": set(range(-(-seq_len // size))),
        "read cache": {slot * width + column for slot in slots_of(case) for column in range(width)},
        "write out": set(range(seq_len * width)),
    }
    slots = slots_of(case)

    def own(program: int) -> Allowed:
        positions = range(program * tile, min((program + 1) * tile, seq_len))
        return {
            "read block_table": {p // size for p in positions},
            "read cache": {slots[p] * width + column for p in positions for column in range(width)},
            "write out": range(program * tile * width, (program + 1) * tile * width),
        }

    around = torch.cat([out.whole[:GUARD], out.whole[-GUARD:]])
    return {
        "out": out.tensor.cpu(),
        "around": bool(around.isnan().all()),
        "changed": [],
        "stray": stray(accesses, [table, cache, out], lambda program: allowed),
        "foreign": stray(accesses, [table, cache, out], own),
        "and": boolean_words(module, "gather_kernel"),
    }


# ----------------------------------------------------------------------------------------------------- 8.2 online_softmax


def softmax_tiles(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Scores, a tensor [K] a tile, as the case has them; and values [K, D] for each."""
    noise = torch.Generator().manual_seed(case["seed"])
    scores = [torch.tensor(tile, dtype=torch.float32) for tile in case["scores"]]
    if case["whole_values"]:
        count = iter(range(1, 100))
        values = [torch.tensor([[float(next(count))] for _ in tile]) for tile in scores]
    else:
        values = [torch.randn(len(tile), case["D"], generator=noise) for tile in scores]
    return scores, values


def run_softmax(module: ModuleType, case: Case) -> dict[str, Any]:
    """The tiles come one after another and are gone: each is made when it is asked for, and not kept here."""
    scores, values = softmax_tiles(case)
    alive: list[Any] = []
    most = [0]

    def one_by_one(tiles: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        for tile in tiles:
            given = tile.clone()
            alive.append(weakref.ref(given))
            most[0] = max(most[0], sum(ref() is not None for ref in alive))
            yield given
            del given

    first, second = one_by_one(scores), one_by_one(values)
    try:
        returned = module.online_softmax(first, second)
    except Exception as error:
        if "'generator' object" in str(error) or "of type 'generator'" in str(error):  # scores[0], len(scores)
            error.args = (f"{error}. Tiles come one after another, as in a kernel: for s, v in zip(scores, values).",)
            raise
        if len(alive) != len(scores):  # not because all scores, and no values, have been taken
            raise
        returned = None
    return {"returned": returned, "most_alive": most[0], "values_left": len(alive) < 2 * len(scores)}


# ------------------------------------------------------------------------------------------------------------- 8.3 attend

PROBE = """
@triton.jit
def probe_kernel(
    sums, bests, totals, q, positions, keys, values, block_table, first, stop, window, scale_log2,
    BLOCK_SIZE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr,
):
    rows, dims = tl.arange(0, ROWS), tl.arange(0, D)
    q_RD = tl.load(q + rows[:, None] * D + dims[None, :])
    sum_RD, best_R, total_R = attend(
        q_RD, tl.load(positions + rows), keys, values, block_table, first, stop, window, scale_log2,
        BLOCK_SIZE, TOKEN_STRIDE, HEAD_DIM, TILE,
    )
    tl.store(sums + rows[:, None] * D + dims[None, :], sum_RD)
    tl.store(bests + rows, best_R)
    tl.store(totals + rows, total_R)
"""


def attend_inputs(case: Case) -> dict[str, torch.Tensor]:
    """q [ROWS, D], of which the case's rows and HEAD_DIM numbers mean anything and the rest is 0; the cache, in which all but
    the sequence's own slots is NaN (or numbers, where the case says so); the table; the rows' positions [ROWS]."""
    noise = torch.Generator().manual_seed(case["seed"])
    rows, head_dim, size, D = len(case["row_positions"]), case["HEAD_DIM"], case["BLOCK_SIZE"], case["D"]
    cache = torch.full((2, case["num_blocks"], size, case["kv_heads"], head_dim), float("nan"))
    if case["stale"] == "numbers":
        cache = 3 * torch.randn(cache.shape, generator=noise)
    for position in range(case["seq_len"]):
        slot = case["block_table"][position // size], position % size
        cache[:, slot[0], slot[1]] = torch.randn(2, case["kv_heads"], head_dim, generator=noise)
    q = torch.zeros(ROWS, D)
    q[:rows, :head_dim] = case["q_size"] * torch.randn(rows, head_dim, generator=noise)
    positions = case["row_positions"] + [case["row_positions"][-1]] * (ROWS - rows)
    dtype = getattr(torch, case["dtype"])
    return {
        "q": q.to(dtype),
        "cache": cache.to(dtype),
        "block_table": torch.tensor(case["block_table"], dtype=torch.int32),
        "positions": torch.tensor(positions, dtype=torch.int32),
    }


def run_attend(module: ModuleType, case: Case) -> dict[str, Any]:
    if plain := no_kernel(module, "attend"):
        return plain
    from minivllm.attention.triton_utils import tl, triton

    namespace = {**vars(module), "triton": triton, "tl": tl}
    remember_text("<the check's kernel>", PROBE)
    exec(compile(PROBE, "<the check's kernel>", "exec", dont_inherit=True), namespace)
    inputs = attend_inputs(case)
    q, cache = Buffer("q", inputs["q"]), Buffer("cache", inputs["cache"])
    table, positions = Buffer("block_table", inputs["block_table"]), Buffer("positions", inputs["positions"])
    out = [Buffer(name, torch.full(shape, -7.0)) for name, shape in (("s", (ROWS, case["D"])), ("b", (ROWS,)), ("t", (ROWS,)))]
    head_dim, start = case["HEAD_DIM"], case["kv_head"] * case["HEAD_DIM"]
    keys, values = (cache.tensor[part].flatten()[start:] for part in (0, 1))
    try:
        with recorded() as accesses:
            namespace["probe_kernel"][(1,)](
                *(buffer.tensor for buffer in out),
                q.tensor,
                positions.tensor,
                keys,
                values,
                table.tensor,
                case["first"],
                case["stop"],
                case["window"] or NO_WINDOW,
                head_dim**-0.5 * LOG2_E,
                BLOCK_SIZE=case["BLOCK_SIZE"],
                TOKEN_STRIDE=case["kv_heads"] * head_dim,
                HEAD_DIM=head_dim,
                ROWS=ROWS,
                D=case["D"],
                TILE=case["TILE"],
            )
    except Exception as error:
        if "unpack" not in f"{error}{error.__cause__}":
            raise
        return {"unpack": str(error.__cause__ or error)[:200]}
    allowed = {"read q": range(ROWS * case["D"]), "read positions": range(ROWS), **walk_of(case)}
    allowed |= {f"write {buffer.name}": range(buffer.tensor.numel()) for buffer in out}
    return {
        **{name: buffer.tensor.cpu() for name, buffer in zip(("sums", "bests", "totals"), out, strict=True)},
        "undefined": any(access.undefined for access in accesses),
        "stray": stray(accesses, [q, cache, table, positions, *out], lambda program: allowed),
        "and": boolean_words(module, "attend"),
    }


def walk_of(case: Case) -> dict[str, Container[int]]:
    """What the positions from `first` to `stop` need: entries of the table, and numbers of the cache."""
    walk, size, head_dim = range(case["first"], case["stop"]), case["BLOCK_SIZE"], case["HEAD_DIM"]
    slots = [case["block_table"][p // size] * size + p % size for p in walk]
    slots += [case["num_blocks"] * size + slot for slot in slots]  # the values lie behind all of the keys
    rows = [(slot * case["kv_heads"] + case["kv_head"]) * head_dim for slot in slots]
    return {
        "read block_table": {p // size for p in walk},
        "read cache": {row + dim for row in rows for dim in range(head_dim)},
    }


# ----------------------------------------------------------------------------------------------------- 8.4 combine_kernel


def combine_inputs(case: Case) -> dict[str, torch.Tensor]:
    """Random parts; where the case says "nothing" a part saw no token."""
    noise = torch.Generator().manual_seed(case["seed"])
    rows, parts, head_dim = len(case["bests"]), len(case["bests"][0]), case["HEAD_DIM"]
    bests = torch.tensor(case["bests"], dtype=torch.float32)
    totals = 1 + 3 * torch.rand(rows, parts, generator=noise)
    sums = torch.randn(rows, parts, head_dim, generator=noise) * totals[..., None]
    if case["whole_numbers"]:
        totals, sums = totals.round(), sums.round()
    nothing = bests == float("-inf")
    totals[nothing], sums[nothing] = 0.0, 0.0
    return {"sums": sums, "bests": bests, "totals": totals}


def run_combine(module: ModuleType, case: Case) -> dict[str, Any]:
    if plain := no_kernel(module, "combine_kernel"):
        return plain
    inputs = {name: Buffer(name, tensor) for name, tensor in combine_inputs(case).items()}
    rows, parts, head_dim = inputs["sums"].tensor.shape
    out = Buffer("out", torch.full((rows, head_dim), -7.0, dtype=getattr(torch, case["dtype"])))
    with recorded() as accesses:
        module.combine_kernel[(rows,)](
            out.tensor,
            *(inputs[name].tensor for name in ("sums", "bests", "totals")),
            parts,
            HEAD_DIM=head_dim,
            D=case["D"],
            P=case["P"],
        )

    def allowed(row: int) -> Allowed:
        own, numbers = range(row * parts, (row + 1) * parts), range(row * parts * head_dim, (row + 1) * parts * head_dim)
        written = range(row * head_dim, (row + 1) * head_dim)
        return {"read bests": own, "read totals": own, "read sums": numbers, "write out": written}

    around = torch.cat([out.whole[:GUARD], out.whole[-GUARD:]])
    return {
        "out": out.tensor.cpu(),
        "around": bool(around.isnan().all()),
        "undefined": any(access.undefined for access in accesses),
        "stray": stray(accesses, [*inputs.values(), out], allowed),
        "and": boolean_words(module, "combine_kernel"),
    }


# ---------------------------------------------------------------------------------------------------- what the compiler says


def run_compiled(module: ModuleType, case: Case) -> dict[str, Any]:
    """What the exercise launches in a case, given to the compiler. refused: [line of the cell or None, its text, the compiler's
    words], or None if it takes the kernel, or where this Triton cannot be asked. wide: whether some address is computed with a
    number of 64 bits; None where that is not known."""
    from triton.compiler.errors import CompilationError

    from minivllm.attention.triton_compile import launches_held_back, read_launch

    with launches_held_back() as launches:
        RUN[case["exercise"]](module, case["case"])
    try:
        texts = [read_launch(launch, case["capability"]) for launch in launches]
    except CompilationError as error:
        return {"refused": _refusal(module, error), "wide": None, "narrow": False}
    except Exception:  # another version's other insides: no word about the student's kernel
        return {"refused": None, "wide": None, "narrow": False}
    added = [line.rpartition(",")[2] for text in texts for line in text.splitlines() if "tt.addptr" in line]
    size = case["case"].get("BLOCK_SIZE", 1)
    return {
        "refused": None,
        "wide": any("i64" in offsets for offsets in added) if added else None,
        "narrow": any(_product_in_32_bits(text, size) for text in texts),
    }


_VALUE = re.compile(r"(%[\w.$-]+) = (?:tt|arith)\.(\w+) (.*)")
_SAME = {"splat", "expand_dims", "broadcast", "reshape", "trans", "extsi", "extui", "trunci", "bitcast"}


def _product_in_32_bits(text: str, block_size: int) -> bool:
    """Whether a number from the block table is multiplied in 32 bits with more than block_size. (Row numbers of a cache fit
    in 32 bits; the numbers before a row may not.) `text` is the kernel as read_launch gives it."""
    numbers: dict[str, int] = {}  # constants
    times: dict[str, int] = {}  # what comes from the table: how often a block's number is in it
    tables: set[str] = set()  # pointers into it
    for line in text.splitlines():
        if "tt.func" in line:
            numbers, times, tables = {}, {}, {"%block_table"}
        if not (found := _VALUE.match(line.strip())):
            continue
        name, op, rest = found.groups()
        given = re.findall(r"%[\w.$-]+", rest.partition(" : ")[0])
        type_of_it = re.sub(r" loc\(.*", "", rest).rpartition(" : ")[2]
        numbers.pop(name, None)
        times.pop(name, None)
        tables.discard(name)
        if op == "constant" and (constant := re.match(r"(?:dense<)?(-?\d+)>? : ", rest)):
            numbers[name] = int(constant[1])
        elif op in ("addptr", *_SAME) and given and given[0] in tables:
            tables.add(name)
        elif op == "load" and given[0] in tables:
            times[name] = 1
        elif op in _SAME and given:
            for known in (numbers, times):
                if given[0] in known:
                    known[name] = known[given[0]]
        elif op in ("addi", "subi", "select", "maxsi", "minsi") and any(one in times for one in given):
            times[name] = max(times.get(one, 0) for one in given)
        elif op in ("muli", "shli") and any(one in times for one in given):
            factors = [times.get(one) or numbers.get(one, 1) for one in given]
            times[name] = factors[0] * factors[1] if op == "muli" else factors[0] << min(factors[1], 64)
            if "i32" in type_of_it and times[name] > block_size:
                return True
    return False


def _refusal(module: ModuleType, error: BaseException) -> list[Any]:
    """The innermost place that is the student's, the innermost words, and the plain function they are about, if it is one."""
    own = {f.src: f for f in vars(module).values() if hasattr(f, "src") and hasattr(f, "starting_line_number")}
    place: list[Any] = [None, ""]
    said = ""
    inner: BaseException | None = error
    while inner is not None:
        kernel, line = own.get(getattr(inner, "src", None)), getattr(getattr(inner, "node", None), "lineno", None)
        if kernel is not None and line is not None:
            first = next(i for i, text in enumerate(kernel.raw_src) if text.lstrip().startswith("def "))  # behind decorators
            place = [kernel.starting_line_number + first + line - 1, kernel.raw_src[first + line - 1].rstrip()]
        said = getattr(inner, "error_message", str(inner)) or said
        inner = inner.__cause__
    called = re.search(r"global variable (\w+)", said)
    plain = getattr(module, called[1], None) if called else None
    return [*place, said[:2000], called[1] if called and inspect.isfunction(plain) else None]


COMPILED = {f"{exercise} compiled": run_compiled for exercise in ("8.1", "8.3", "8.4")}
RUN = {"8.1": run_first, "8.2": run_softmax, "8.3": run_attend, "8.4": run_combine, **COMPILED}
