"""modded-nanogpt's speed records: the training scripts in their logs, on rank 0 of 8.

    modded_nanogpt.py RECORD

Each log has the whole script, and the peaks after the last step. The case takes the script from the log,
changes it as below, and runs it. It then reads the same lines in the log that the script wrote.

- Four training steps instead of thousands, on random tokens; the shapes of a step do not change.
- No coordinate descent in Inductor, which compiles each kernel many times to time it.
- No checks of strides in compiled code. BatchSize describes a result of its own op with wrong strides, which
  PyTorch checks since 2.7.0.

A log is in the cache folder, or is fetched from GitHub. Its Git hash is checked.
"""

import hashlib
import os
import re
import runpy
import sys
import urllib.request
from pathlib import Path

import numpy
from harness import figure

ADDRESS = "https://raw.githubusercontent.com/KellerJordan/modded-nanogpt"
COMMIT = "f411b3d346aa52d3504324ca93c230fd84c6c07f"
MEDIUM = "records/track_2_medium"
SHORT = "records/track_1_short"
# Each record's log, and the hash of the Git blob.
RECORDS = {
    "BatchSize": (
        f"{SHORT}/2025-01-26_BatchSize/0bdd5ee9-ac28-4202-bdf1-c906b102b0ec.txt",
        "79558a2c7058a1a04131c4d4683cad8f6792cf1b",
    ),
    "RuleTweak": (
        f"{SHORT}/2025-02-01_RuleTweak/eff63a8c-2f7e-4fc5-97ce-7f600dae0bc7.txt",
        "23b2895a8820c655aac32cc0bed35061693955eb",
    ),
    "FasterReduce": (
        f"{SHORT}/2025-05-24_FasterReduce/23f40b75-06fb-4c3f-87a8-743524769a35.txt",
        "15129dbd3a686691dac60792a6b1848a0319211a",
    ),
    "StableTorch": (
        f"{SHORT}/2025-05-24_StableTorch/89d9f224-3b01-4581-966e-358d692335e0.txt",
        "7792ce1e9f41a2d7bb32453afb07d04bb1845730",
    ),
    "EvenFasterReduce": (
        f"{SHORT}/2025-05-25_EvenFasterReduce/6ae86d05-5cb2-4e40-a512-63246fd08e45.txt",
        "f84ec3f969b9dc4645a18c2c04b8acaa5bc6e6df",
    ),
    "MuonWithAuxAdamExample": (
        f"{SHORT}/2025-05-25_MuonWithAuxAdamExample/b01550f9-03d8-4a9c-86fe-4ab434f1c5e0.txt",
        "0ff5f23333f0019426bada845dd8e1f8721ac21f",
    ),
    "medium-BlockMaskRedundantOp": (
        f"{MEDIUM}/2025-11-12_BlockMaskRedundantOp/000_3b22a9d4-b52e-4916-99bf-3d48b38747a7.txt",
        "b6bbf88f4b204d01af6c1c810baed07fc458d8f5",
    ),
}
STEPS = 4
# The steps of the longest warmup and of the training, each with up to 2**19 tokens, and a reserve.
TRAINING_TOKENS = (10 + STEPS + 2) * 2**19
# Changes to the script: a pattern that it contains once, and the replacement.
CHANGES = {
    r"(num_iterations(?: : int)? = )\d+": rf"\g<1>{STEPS}",
    r"(coordinate_descent_tuning = \(?\s*)True": r"\g<1>False",
}


def read_log(name: str) -> str:
    path, blob = RECORDS[name]
    kept = Path(os.environ["MEMTRACE_CACHE"]) / "modded-nanogpt" / blob
    if not kept.exists():
        with urllib.request.urlopen(f"{ADDRESS}/{COMMIT}/{path}", timeout=60) as answer:
            content = answer.read()
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(content)
    content = kept.read_bytes()
    if hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() != blob:
        raise SystemExit(f"{kept} is not the log of {name}; remove it")
    return content.decode()


def script_of(name: str, log: str) -> str:
    parts = [part for part in log.split("=" * 100 + "\n") if part.strip()]
    code = parts[0]
    for pattern, replacement in CHANGES.items():
        code, count = re.subn(pattern, replacement, code)
        if count != 1:
            raise SystemExit(f"{name} has {pattern} {count} times")
    return code


def write_tokens(path: Path, count: int) -> None:
    """Writes random tokens in the format of the scripts' data files, in documents of 1,000 tokens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = numpy.zeros(256, dtype=numpy.int32)
    header[:3] = 20240520, 1, count
    tokens = numpy.random.default_rng(0).integers(0, 50256, count, dtype=numpy.uint16)
    tokens[::1000] = 50256
    path.write_bytes(header.tobytes() + tokens.tobytes())


name = sys.argv[1]
script = Path("train_gpt.py").resolve()
script.write_text(script_of(name, read_log(name)))
data = Path("data/fineweb10B")
write_tokens(data / "fineweb_train_000001.bin", TRAINING_TOKENS)
write_tokens(data / "fineweb_val_000000.bin", 10485760 + 2**22)
os.environ["TORCHINDUCTOR_SIZE_ASSERTS"] = "0"
sys.argv = [str(script)]
runpy.run_path(str(script), run_name="__main__")

[written] = Path("logs").glob("*.txt")
text = written.read_text()
PATTERNS = {
    "allocated": r"peak memory (?:allocated|consumption): (\d+) MiB",
    "reserved": r"MiB reserved: (\d+) MiB",
}
found = {what: re.search(pattern, text) for what, pattern in PATTERNS.items()}
figure(name, **{what: int(match[1]) << 20 for what, match in found.items() if match})
