"""Decides the cells of docs/gpus.md from runs, and writes its tables. For scripts/gpu-table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from .page_block import PageBlock

# The order in which the runs are made.
MODELS = [
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen2.5-7B",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-14B",
    "meta-llama/Llama-3.1-70B",
    "mistralai/Mistral-7B-v0.3",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.2-3B",
    "google/gemma-2-9b",
    "Qwen/Qwen3-1.7B",
    "microsoft/phi-4",
    "google/gemma-2-2b",
    "Qwen/Qwen2.5-14B",
    "Qwen/Qwen2.5-32B",
    "Qwen/Qwen2.5-72B",
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2.5-3B",
]
METHODS = {"full": "Full fine-tuning", "lora": "LoRA", "qlora": "QLoRA", "infer": "Inference"}
LENGTHS = ["2048", "8192"]
# From the least memory to the most.
CARDS = {
    "rtx3060": "RTX 3060",
    "rtx4080": "RTX 4080",
    "rtx4090": "RTX 4090",
    "rtx5090": "RTX 5090",
    "l40s": "L40S",
    "h100-80g": "H100",
    "h200": "H200",
    "b200": "B200",
}
KEY = ["model", "method", "tokens", "card"]
OUTCOMES = ("fits", "out of memory")
MARGIN = 0.05  # the share of a card's free memory by which a run on another card must clearly fit or not fit
NEAR = 0.03  # the share of a card's free memory within which a cell is marked
MARKS = "<!-- scripts/gpu-table writes from here -->\n", "<!-- to here -->\n"
GIB = 1 << 30

Run = dict[str, str]
Runs = dict[tuple[str, ...], Run]


def taken_by(run: Run) -> int:
    """Returns the bytes of device memory that a run took after its start, without the context."""
    return int(run["used"]) - (int(run["capacity"]) - int(run["free"]))


def decided(runs: Runs, free: dict[str, int], cell: tuple[str, ...]) -> str:
    """Returns the outcome of a cell, or an empty text if no run decides it.

    Its own run decides it. So does a run of the same model, method and length on another card in these cases:
    it took less than 95% of the memory that this card has free at the start; its tensors alone, without gaps,
    needed more than 105% of it; or it ran out of memory on a card with more than 105% of it.
    """
    if cell in runs:
        return runs[cell]["outcome"]
    *work, card = cell
    for other in CARDS:
        run = runs.get((*work, other))
        if run and run["outcome"] in OUTCOMES:
            fits = run["outcome"] == "fits"
            if fits and taken_by(run) < free[card] * (1 - MARGIN):
                return "fits"
            if int(run["allocated" if fits else "free"]) > free[card] * (1 + MARGIN):
                return "out of memory"
    return ""


def is_open(runs: Runs, free: dict[str, int], model: str) -> bool:
    """Returns whether a cell of the model is undecided, or its run failed for another reason than memory."""
    cells = product([model], METHODS, LENGTHS, CARDS)
    return any(decided(runs, free, cell) not in OUTCOMES for cell in cells)


def is_near(runs: Runs, free: dict[str, int], cell: tuple[str, ...]) -> bool:
    """Returns whether a cell's outcome is within `NEAR` of the limit: a run of the same work used almost what
    its card has free, or its outcome depends on the size of the context."""
    *work, card = cell
    if runs.get(cell, {}).get("near"):
        return True
    for other in CARDS:
        run = runs.get((*work, other))
        if run and run["outcome"] == "fits" and abs(taken_by(run) / free[card] - 1) < NEAR:
            return True
    return False


def text_of(runs: Runs, free: dict[str, int], model: str, method: str, card: str) -> str:
    """Returns the text of a cell: the longest length that fits, with "?" where it is near the limit."""
    text = "no"
    for length in LENGTHS:
        cell = (model, method, length, card)
        name = f"{int(length) // 1024}k" + "?" * is_near(runs, free, cell)
        if decided(runs, free, cell) == "fits":
            text = name
        else:
            return f"{text} ({name})" if name.endswith("?") else text
    return text


def peaks(runs: Runs, model: str, method: str) -> Iterator[str]:
    """Yields the peak of allocated memory at each length, on the largest card."""
    for length in LENGTHS:
        run = runs[model, method, length, list(CARDS)[-1]]
        yield f"{int(run['allocated']) / GIB:.1f}" if run["outcome"] == "fits" else ""


def write_page(page: Path, runs: Runs, free: dict[str, int]) -> None:
    """Writes the tables of the models without an open cell between the marks of the page."""
    models = [model for model in MODELS if not is_open(runs, free, model)]
    shown = [run for run in runs.values() if run["model"] in models]
    days = sorted({run["day"] for run in shown})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "no day"
    cells = len(models) * len(METHODS) * len(LENGTHS) * len(CARDS)
    versions = shown[0]["versions"] if shown else ""
    own = sum(run["outcome"] in OUTCOMES for run in shown)
    counts = (
        f"{len(models)} of {len(MODELS)} models: {own} cells were run, {cells - own:,} follow from these runs"
    )
    lines = [f"{counts}. The runs are of {when}, with {versions}."]
    for method, title in METHODS.items():
        heads = ["model", *CARDS.values(), *(f"GiB at {int(length):,}" for length in LENGTHS)]
        lines += ["", f"### {title}", "", f"| {' | '.join(heads)} |"]
        lines.append("| --- |" + " --- |" * len(CARDS) + " ---: |" * len(LENGTHS))
        for model in models:
            row = [model.split("/")[1], *(text_of(runs, free, model, method, card) for card in CARDS)]
            lines.append(f"| {' | '.join(row + list(peaks(runs, model, method)))} |")
    PageBlock(page, *MARKS).write("\n" + "\n".join(lines) + "\n\n")
