"""The files that accelerate is launched with are files that accelerate reads, and say what the page
about training says of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("accelerate")
from accelerate.commands.config.config_args import load_config_from_file

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "docs" / "training").glob("*.yaml"))


def test_there_is_one_for_each_way_the_page_names() -> None:
    page = (ROOT / "docs" / "train-your-own-kernel-writer.md").read_text(encoding="utf-8")
    assert [path.stem for path in FILES] == ["fsdp", "zero3"]
    assert all(f"docs/training/{path.name}" in page for path in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_accelerate_knows_every_name_in_it(path: Path) -> None:
    config = load_config_from_file(str(path))  # raises ValueError for names that it does not know
    assert config.num_processes == 4
    assert config.mixed_precision == "bf16"
    assert path.name in path.read_text().splitlines()[0]


def test_what_is_sharded_and_offloaded_is_what_the_names_say() -> None:
    fsdp, zero = (load_config_from_file(str(path)) for path in FILES)
    assert fsdp.fsdp_config["fsdp_version"] == 2
    assert (
        zero.deepspeed_config["zero_stage"],
        zero.deepspeed_config["offload_optimizer_device"],
    ) == (3, "cpu")
