"""Connects memtrace to Lightning.

trainer = Trainer(callbacks=[memtrace.integrations.lightning.MemtraceCallback()])
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

from .. import _marks
from . import peaks


class MemtraceCallback(Callback):
    """Marks validation, testing and prediction (`eval`) and saving (`checkpoint`) as phases, numbers steps
    like the trainer, and logs the peaks of GPU memory: `gpu_peak_allocated_mib` and `gpu_peak_reserved_mib`.

    Does nothing if the process is not traced."""

    def __init__(self) -> None:
        self._open = ExitStack()

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if _marks.is_traced() and not getattr(trainer.save_checkpoint, "of_memtrace", False):
            trainer.save_checkpoint = _marks.phase("checkpoint")(trainer.save_checkpoint)
            trainer.save_checkpoint.of_memtrace = True

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        _marks.step(trainer.global_step)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if _marks.is_traced():
            for name, value in peaks().items():
                pl_module.log(name, value)

    def _begin(self, trainer: Any, pl_module: Any) -> None:
        self._open.enter_context(_marks.phase("eval"))

    def _end(self, trainer: Any, pl_module: Any) -> None:
        self._open.close()

    on_validation_start = on_test_start = on_predict_start = _begin
    on_validation_end = on_test_end = on_predict_end = _end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._open.close()
