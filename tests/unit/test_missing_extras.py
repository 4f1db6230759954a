"""Adapters without their package: an error that names the extra, never a bare ImportError."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.contract.errors import ConfigError
from pipeline.trainer.adapters.inspect_log import write_inspect_log
from pipeline.trainer.adapters.segment_table import segment_dataset, segment_table, write_segments
from pipeline.trainer.adapters.trl_worker import PipelineRolloutWorker
from pipeline.trainer.adapters.verl_batch import data_proto
from pipeline.trainer.adapters.verl_queue import put_batch
from pipeline.trainer.train_batch import TrainBatch

EMPTY = TrainBatch("sums", "trainer", 0, (), replayed=False)
NOTHING: Any = None


def imported(module: str) -> Callable[[], Any]:
    name = f"pipeline.trainer.adapters.{module}"

    def make() -> None:
        sys.modules.pop(name, None)
        importlib.import_module(name)

    return make


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("pyarrow", "parquet", lambda: segment_table(EMPTY)),
        ("pyarrow", "parquet", lambda: write_segments([], Path("unwritten"), run="sums")),
        ("datasets", "datasets", lambda: segment_dataset([EMPTY], run="sums")),
        ("torch", "torch", imported("torch_dataset")),
        ("trl", "trl", imported("trl_rollouts")),
        ("trl", "trl", lambda: PipelineRolloutWorker(NOTHING, held_rows=0)),
        ("verl", "verl", lambda: data_proto(EMPTY)),
        ("verl", "verl", lambda: put_batch(EMPTY, [], global_steps=1)),
        (
            "inspect_ai",
            "inspect",
            lambda: write_inspect_log(NOTHING, NOTHING, Path("unwritten"), payloads=NOTHING),
        ),
    ],
)
def test_a_missing_package_names_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, package: str, extra: str, use: Callable[[], Any]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"rollout-pipeline\[{extra}\]") as told:
        use()
    assert isinstance(told.value, ImportError)
    assert told.value.code == "E112"
    assert not Path("unwritten").exists()
