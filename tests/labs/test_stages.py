"""A class that says what it can do is a stage: taken whole into my_engine/, until a later lab's answer for it has passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checks.authoring.source import answer_source
from checks.exercises import find, table
from checks.student.assemble import Answer, assemble
from checks.student.engine import REFERENCE
from minivllm.components import load_file

POOL_TEXT = (REFERENCE / "core" / "block_pool.py").read_text()
MANAGER_TEXT = (REFERENCE / "core" / "kv_cache_manager.py").read_text()
LATER = '''class BlockPool:
    def free(self, blocks):
        """Lab 07's."""
        for block in blocks:
            block.ref_cnt -= 1
            self.free_block_queue.append(block)

    def touch(self, blocks):
        """Lab 07's."""
'''


def module_of(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "part.py"
    path.write_text(text)
    return load_file(path)


def test_a_stage_brings_its_init_its_properties_and_what_it_can_do(tmp_path: Path) -> None:
    text = assemble(POOL_TEXT, [Answer(find("4.1"), answer_source(find("4.1")))])
    pool = module_of(tmp_path, text).BlockPool(4)
    assert pool.capabilities == {"allocate"} and pool.num_free_blocks == 3
    assert not hasattr(pool, "free_block_queue")  # minivllm's __init__ did not run
    assert [block.block_id for block in pool.allocate(2)] == [1, 2]


def test_an_init_with_other_parameters_stays_behind(tmp_path: Path) -> None:
    text = assemble(MANAGER_TEXT, [Answer(find("4.2"), answer_source(find("4.2")))])
    module = module_of(tmp_path, text)
    manager = module.KVCacheManager(module.BlockPool(5), 4, 64, enable_caching=False)
    assert manager.capabilities == {"paging"} and manager.usage == 0


def test_a_name_of_the_same_file_imported_from_minivllm_is_that_name(tmp_path: Path) -> None:
    text = assemble(POOL_TEXT, [Answer(find("4.1"), answer_source(find("4.1")))])
    assert "import KVCacheBlock" not in text
    module = module_of(tmp_path, text)
    assert isinstance(module.BlockPool(2).null_block, module.KVCacheBlock)


def test_helper_methods_come_along(tmp_path: Path) -> None:
    source = answer_source(find("4.1")).replace("n > self.num_free_blocks", "self._too_many(n)")
    source += "\n    def _too_many(self, n):\n        return n > len(self.free_blocks)\n"
    pool = module_of(tmp_path, assemble(POOL_TEXT, [Answer(find("4.1"), source)])).BlockPool(3)
    with pytest.raises(ValueError, match="Cannot allocate 3 blocks: 2 are free"):
        pool.allocate(3)


def test_an_attribute_that_only_the_labs_init_sets_is_refused_by_name() -> None:
    source = answer_source(find("4.2")).replace("self.req_to_blocks = {}", "self.req_to_blocks = {}\n        self.seen = []")
    source = source.replace("return new_blocks", "self.seen.append(request)\n        return new_blocks")
    with pytest.raises(
        ValueError, match=r"allocate_slots uses self\.seen, and minivllm's KVCacheManager has no such attribute"
    ):
        assemble(MANAGER_TEXT, [Answer(find("4.2"), source)])


def test_a_stage_is_left_out_once_a_later_lab_has_passed(tmp_path: Path) -> None:
    stage, later = Answer(find("4.1"), answer_source(find("4.1"))), Answer(table()["7.3"], LATER)
    text = assemble(POOL_TEXT, [stage, later])
    pool = module_of(tmp_path, text).BlockPool(4)
    assert pool.capabilities == {"allocate", "caching"} and pool.free.__doc__ == "Lab 07's."
    assert "exercise 4.1" not in text and "exercise 7.3" in text


def test_use_brings_a_stage_back(tmp_path: Path) -> None:
    """The answer that counts most comes last."""
    stage, later = Answer(find("4.1"), answer_source(find("4.1"))), Answer(table()["7.3"], LATER)
    pool = module_of(tmp_path, assemble(POOL_TEXT, [later, stage])).BlockPool(4)
    assert pool.capabilities == {"allocate"} and pool.num_free_blocks == 3


def test_methods_of_a_class_that_is_no_stage_leave_the_rest_alone(tmp_path: Path) -> None:
    source = (
        "class BlockPool:\n    def __init__(self):\n        pass\n\n    def free(self, blocks):\n        self._one(blocks)\n\n"
        "    def touch(self, blocks):\n        pass\n\n    def _one(self, blocks):\n        self.freed = list(blocks)\n"
    )
    pool = module_of(tmp_path, assemble(POOL_TEXT, [Answer(table()["7.3"], source)])).BlockPool(4)
    pool.free([1])
    assert pool.freed == [1] and pool.num_free_blocks == 3 and "caching" in pool.capabilities
