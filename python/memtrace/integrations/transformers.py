"""Connects memtrace to the Trainer of Hugging Face transformers.

trainer = Trainer(model=model, args=args, ...)
memtrace.integrations.transformers.watch(trainer)
trainer.train()
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .. import _marks
from . import peaks


class MemtraceCallback(TrainerCallback):
    """Adds the peaks of GPU memory to each entry of the trainer's log: `gpu_peak_allocated_mib` and
    `gpu_peak_reserved_mib`. It must run before the callbacks that report the log; `watch` ensures this."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is None or not _marks.is_traced():
            return
        figures = peaks()
        logs.update(figures)
        # The Trainer has already put a copy of the entry into its history, so the copy gets the peaks, too.
        if state.log_history:
            state.log_history[-1].update(figures)


def watch(trainer: Any) -> Any:
    """Marks the trainer's evaluation (`eval`), saving (`checkpoint`) and generation (`generate`) as phases,
    and adds the peaks to its log, and so to TensorBoard or W&B. Returns the trainer.

    Does nothing if the process is not traced. A second call has no effect."""
    callbacks = trainer.callback_handler.callbacks
    if not _marks.is_traced() or any(isinstance(callback, MemtraceCallback) for callback in callbacks):
        return trainer
    callbacks.insert(0, MemtraceCallback())
    for phase, name in [("eval", "evaluate"), ("eval", "predict"), ("checkpoint", "save_model")]:
        _name(trainer, name, phase)
    if hasattr(trainer, "_save_checkpoint"):
        _name(trainer, "_save_checkpoint", "checkpoint")
    # The class, because a copy of the model would keep a method of the original among its attributes.
    model_class = type(trainer.model)
    if hasattr(model_class, "generate") and not hasattr(model_class.generate, "memtrace"):
        _name(model_class, "generate", "generate")
        model_class.generate.memtrace = True
    return trainer


def _name(owner: Any, method: str, phase: str) -> None:
    """Makes a method of an object or a class run inside a phase."""
    setattr(owner, method, _marks.phase(phase)(getattr(owner, method)))
