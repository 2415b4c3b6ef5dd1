"""modded-nanogpt's speed records: the training scripts in their logs, on one rank of 8.

    modded_nanogpt.py RECORD [nvidia-smi]

Each log has the whole script, the output of nvidia-smi, and the peaks after the last step. The case takes
the script from the log, changes it as below, and runs it. It then reads the same lines in the log that the
script wrote. With `nvidia-smi` the run ends after the script has called nvidia-smi, before the training.

- Four training steps instead of thousands, on random tokens; the shapes of a step do not change. Since
  LogitRescale they do change, and the warmup runs each shape: it has the first steps, and those around each
  change. The training then repeats the steps of the warmup, and ends with the last step.
- No coordinate descent in Inductor, which compiles each kernel many times to time it. Inductor also times no
  other variants of a kernel, and the kernels are empty (`harness/empty_kernels.py`).
- Compiled graphs are in the cache folder, so records with the same model share them.
- FlashAttention 3 is not from a hub (`harness/flash_attention_3.py`).
- No checks of strides in compiled code. BatchSize describes a result of its own op with wrong strides, which
  PyTorch checks since 2.7.0.

`modded_nanogpt.csv` names the log of each record. A log is in the cache folder, or is fetched from GitHub.
Its hash is checked. If a record has several logs with the same script, the case takes the first by name.
"""

import contextlib
import csv
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy
from harness import figure
from harness.empty_kernels import compile_empty_kernels
from harness.flash_attention_3 import provide_kernels
from harness.pinned import read_pinned

REPOSITORY = "KellerJordan/modded-nanogpt"
COMMIT = "f411b3d346aa52d3504324ca93c230fd84c6c07f"
STEPS = 4
# The steps of the longest warmup and of the training, each with up to 2**20 tokens, and a reserve.
TRAINING_TOKENS = (10 + STEPS + 2) * 2**20
# The steps of the longest warmup, each with a batch of validation, and a reserve.
VALIDATION_TOKENS = 24 * 2**21
# Changes to every script: a pattern that it contains once, and the replacement.
CHANGES = {
    r"(?m)^import torch$": "import torch\nimport torch._inductor.config as inductor\n"
    "inductor.triton.autotune_pointwise = False",
}
FEWER_STEPS = {r"(num_iterations(?: : int)? = )\d+": rf"\g<1>{STEPS}"}
STEPS_OF_WARMUP = {r"range\(train_steps \+ 1\)": "[*warmup_steps, train_steps]"}
# Changes to the scripts that contain a pattern. The second is of a line that needs Python 3.12, the last
# of a folder on the source's machine.
MORE_CHANGES = {
    r"(coordinate_descent_tuning = \(?\s*)True": r"\g<1>False",
    r'(f"\w+: \{metadata_fn\(\)\.get)\("filename", "Unknown"\)': r"\1('filename', 'Unknown')",
    r'f"/mnt/wsfuse/[^"]*"': '"logs"',
}
# The script's second file follows below these lines.
KERNELS = f"{'-' * 40}\n# triton_kernels.py\n{'-' * 40}\n"


def read_log(name: str) -> str:
    with Path(__file__).with_suffix(".csv").open(newline="", encoding="utf-8") as file:
        logs = {row["record"]: row for row in csv.DictReader(file)}
    if name not in logs:
        raise SystemExit(f"no record {name}; there are {', '.join(logs)}")
    return read_pinned(REPOSITORY, COMMIT, logs[name]["log"], logs[name]["blob"])


def write_script(name: str, path: Path) -> None:
    """Writes the script of a record's log, and its module of kernels beside it, if it has one."""
    parts = [part for part in read_log(name).split("=" * 100 + "\n") if part.strip()]
    code, _, kernels = parts[0].partition(KERNELS)
    needed = CHANGES | (STEPS_OF_WARMUP if "Sampling steps {warmup_steps}" in code else FEWER_STEPS)
    for pattern, replacement in [*needed.items(), *MORE_CHANGES.items()]:
        code, count = re.subn(pattern, replacement, code)
        if count > 1 or (count == 0 and pattern in needed):
            raise SystemExit(f"{name} has {pattern} {count} times")
    path.write_text(code)
    path.with_name("triton_kernels.py").write_text(kernels)


def write_tokens(path: Path, count: int) -> None:
    """Writes random tokens in the format of the scripts' data files, in documents of 1,000 tokens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = numpy.zeros(256, dtype=numpy.int32)
    header[:3] = 20240520, 1, count
    tokens = numpy.random.default_rng(0).integers(0, 50256, count, dtype=numpy.uint16)
    tokens[::1000] = 50256
    path.write_bytes(header.tobytes() + tokens.tobytes())


def run_script(script: Path, only_nvidia_smi: bool) -> str:
    """Runs the script. Returns the table that nvidia-smi printed when the script called it."""
    tables: list[str] = []
    run = subprocess.run

    def listening_run(command, *arguments, **options):
        done = run(command, *arguments, **options)
        if command == ["nvidia-smi"]:
            tables.append(done.stdout)
            if only_nvidia_smi:
                raise SystemExit
        return done

    subprocess.run = listening_run
    with contextlib.suppress(SystemExit):
        runpy.run_path(str(script), run_name="__main__")
    [table] = tables
    return table


name, *options = sys.argv[1:]
if options not in ([], ["nvidia-smi"]):
    raise SystemExit(f"unknown arguments {' '.join(options)}; expected RECORD or RECORD nvidia-smi")
script = Path("train_gpt.py").resolve()
write_script(name, script)
sys.path.insert(0, str(script.parent))
Path("logs/final").mkdir(parents=True)
data = Path("data/fineweb10B")
write_tokens(data / "fineweb_train_000001.bin", TRAINING_TOKENS)
# Some scripts read the next file ahead.
(data / "fineweb_train_000002.bin").hardlink_to(data / "fineweb_train_000001.bin")
write_tokens(data / "fineweb_val_000000.bin", VALIDATION_TOKENS)
os.environ["TORCHINDUCTOR_SIZE_ASSERTS"] = "0"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(os.environ["MEMTRACE_CACHE"]) / "inductor-empty")
compile_empty_kernels()
provide_kernels()
sys.argv = [str(script)]
table = run_script(script, options == ["nvidia-smi"])

[process] = re.findall(r"^\| +0 +N/A .* (\d+)MiB \|$", table, re.M)
[written] = script.parent.rglob("*.txt")
text = written.read_text()
PATTERNS = {
    "allocated": r"peak memory (?:allocated|consumption): (\d+) MiB",
    "reserved": r"MiB reserved: (\d+) MiB",
}
found = {what: re.search(pattern, text) for what, pattern in PATTERNS.items()}
peaks = {what: int(match[1]) << 20 for what, match in found.items() if match}
figure(name, **peaks, process=int(process) << 20)
