"""modded-nanogpt's speed records: the training scripts in their logs, on one rank of 8.

    modded_nanogpt.py RECORD [nvidia-smi]

Each log has the whole script, the output of nvidia-smi, and the peaks after the last step. The case takes
the script from the log, changes it as below, and runs it. It then reads the same lines in the log that the
script wrote. With `nvidia-smi` the run ends after the script has called nvidia-smi, before the training.

- Four training steps instead of thousands, on random tokens; the shapes of a step do not change.
- No coordinate descent in Inductor, which compiles each kernel many times to time it. Inductor also times no
  other variants of a kernel, and the kernels are empty (`harness/empty_kernels.py`).
- Compiled graphs are in the cache folder, so records with the same model share them.
- No checks of strides in compiled code. BatchSize describes a result of its own op with wrong strides, which
  PyTorch checks since 2.7.0.

A log is in the cache folder, or is fetched from GitHub. Its Git hash is checked. If a record has several
logs with the same script, the case takes the first by name.
"""

import contextlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy
from harness import figure
from harness.empty_kernels import compile_empty_kernels
from harness.pinned import read_pinned

REPOSITORY = "KellerJordan/modded-nanogpt"
COMMIT = "f411b3d346aa52d3504324ca93c230fd84c6c07f"
MEDIUM = "records/track_2_medium"
SHORT = "records/track_1_short"
# Each record's log, and the hash of the Git blob.
RECORDS = {
    "Muon": (
        f"{SHORT}/2024-10-10_Muon/eb5659d0-fb6a-49e5-a311-f1f89412f726.txt",
        "64db780665c66aa04cc03d7e4ab75dee59ce6439",
    ),
    "ModernArch": (
        f"{SHORT}/2024-10-14_ModernArch/dabaaddd-237c-4ec9-939d-6608a9ed5e27.txt",
        "65445bff6d1a7a9a51aaee489cc02fda556f3710",
    ),
    "DistributedMuon": (
        f"{SHORT}/2024-10-17_DistributedMuon/22d24867-eb5a-4fcc-ae2c-263d0277dfd1.txt",
        "d3c9ac6437760741481c1a5018992f5a921aeff1",
    ),
    "PyTorch25": (
        f"{SHORT}/2024-10-18_PyTorch25/d4bfb25f-688d-4da5-8743-33926fad4842.txt",
        "5580a40f20a774d20627b6ed49272e7ca760da4a",
    ),
    "Optimizers-2": (
        f"{SHORT}/2024-10-29_Optimizers/8d6193f4-27fc-4e68-899f-af70019a4d54.txt",
        "6e6d01de2437e22c91eadd5e64fb42b5d294694f",
    ),
    "Optimizers-3": (
        f"{SHORT}/2024-10-29_Optimizers/95a9fd44-7c13-49c7-b324-3e7d9e23a499.txt",
        "3862910dd31b0ce30be609f20a75dc309ebd2e91",
    ),
    "UntieEmbed": (
        f"{SHORT}/2024-11-03_UntieEmbed/d6b50d71-f419-4d26-bb39-a60d55ae7a04.txt",
        "e6e05c00172f3cbbc3df0de31d34d754d722c6d2",
    ),
    "ShortcutsTweaks": (
        f"{SHORT}/2024-11-06_ShortcutsTweaks/042f9e87-07e6-4504-bb04-4ec59a380211.txt",
        "e031387ce3cbb5b12e69d70fa031e72e9c86aeda",
    ),
    "Replicateleloykun": (
        f"{SHORT}/2024-11-09_Replicateleloykun/1621af10-aa0c-42af-bf54-8a773c63a2af.txt",
        "237ad6140cb4b8aaec3428e85ac61b73db6e4f50",
    ),
    "ScaleShortcuts": (
        f"{SHORT}/2024-11-10_ScaleShortcuts/3e55eb2e-6261-466a-b1e9-2b31f56fb16a.txt",
        "5d7b7f5b507132334d6ec5cd1f995ed08dd8b0aa",
    ),
    "UNetDoubleLr": (
        f"{SHORT}/2024-11-10_UNetDoubleLr/c87bb826-797b-4f37-98c7-d3a5dad2de74.txt",
        "4ef6d69736c2e49ccc1ce4ca98f35128ea7adb8d",
    ),
    "Fp8LmHead": (
        f"{SHORT}/2025-01-13_Fp8LmHead/c51969c2-d04c-40a7-bcea-c092c3c2d11a.txt",
        "5eeba8b041db43ab00d5fdfc9b9265ce05ee229d",
    ),
    "Sub3Min": (
        f"{SHORT}/2025-01-16_Sub3Min/1d3bd93b-a69e-4118-aeb8-8184239d7566.txt",
        "3825e124d6ba91c639f031f059c96ffc1c9a9937",
    ),
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
    "BosAlign": (
        f"{SHORT}/2025-07-12_BosAlign/0c5449cc-0b01-4ecc-bec3-f46a09741d60.txt",
        "f4a759a5ea0e783538ce104b18f40a0861a0ee60",
    ),
    "medium-2025-01-18": (
        f"{MEDIUM}/2025-01-18/241dd7a7-3d76-4dce-85a4-7df60387f32a.txt",
        "b2f7ee002ecae7775366de8cad425d64e350878b",
    ),
    "medium-WeightDecay": (
        f"{MEDIUM}/2025-02-08_WeightDecay/b01743db-605c-4326-b5b1-d388ee5bebc5.txt",
        "33888440b28c833327aa732f2acd78ff145603ee",
    ),
    "medium-OptCoeffs": (
        f"{MEDIUM}/2025-02-14_OptCoeffs/1baa66b2-bff7-4850-aced-d63885ffb4b6.txt",
        "f9788d12760e87355f88648747213d91778b701e",
    ),
    "medium-LongerCooldown": (
        f"{MEDIUM}/2025-03-06_LongerCooldown/779c041a-2a37-45d2-a18b-ec0f223c2bb7.txt",
        "6e26b14cfc2714635003ffeb8ab226867ea96d4b",
    ),
    "medium-ArchOptTweaks": (
        f"{MEDIUM}/2025-03-25_ArchOptTweaks/train_gpt-20250329.txt",
        "98efd5229210ea1b04ba9c94fabc1c39b0ca8a6a",
    ),
    "medium-Record7": (
        f"{MEDIUM}/2025-04-16_Record7/223_3310d0b1-b24d-48ee-899f-d5c2a254a195.txt",
        "bae10dd30d134385dfc8d412158678e64e958418",
    ),
    "medium-Record8": (
        f"{MEDIUM}/2025-04-22_Record8/075_640429f2-e726-4e83-aa27-684626239ffc.txt",
        "5fd11933353cb98b04c949cc24a27d0669505700",
    ),
    "medium-UpdateSmoothing": (
        f"{MEDIUM}/2025-09-17_UpdateSmoothing/001_8379f695-6bc3-4f76-b58b-8fadd3b6ebb0.txt",
        "090ca6e3ecb0ec0cfb051cad95264f7505079e59",
    ),
    "medium-SmoothedSnooMedium": (
        f"{MEDIUM}/2025-09-30_SmoothedSnooMedium/101_5bc91cd0-cb46-428c-a5da-9d8d228f1f97.txt",
        "ed311235f64bcb5d3476ef16ca26108bf2f2da02",
    ),
    "medium-BlockMaskRedundantOp": (
        f"{MEDIUM}/2025-11-12_BlockMaskRedundantOp/000_3b22a9d4-b52e-4916-99bf-3d48b38747a7.txt",
        "b6bbf88f4b204d01af6c1c810baed07fc458d8f5",
    ),
}
STEPS = 4
# The steps of the longest warmup and of the training, each with up to 2**20 tokens, and a reserve.
TRAINING_TOKENS = (10 + STEPS + 2) * 2**20
# Changes to every script: a pattern that it contains once, and the replacement.
CHANGES = {
    r"(num_iterations(?: : int)? = )\d+": rf"\g<1>{STEPS}",
    r"(?m)^import torch$": "import torch\nimport torch._inductor.config as inductor\n"
    "inductor.triton.autotune_pointwise = False",
}
# Changes to the scripts that contain a pattern. The second is of a line that needs Python 3.12.
MORE_CHANGES = {
    r"(coordinate_descent_tuning = \(?\s*)True": r"\g<1>False",
    r'(f"\w+: \{metadata_fn\(\)\.get)\("filename", "Unknown"\)': r"\1('filename', 'Unknown')",
}


def read_log(name: str) -> str:
    path, blob = RECORDS[name]
    return read_pinned(REPOSITORY, COMMIT, path, blob)


def script_of(name: str, log: str) -> str:
    parts = [part for part in log.split("=" * 100 + "\n") if part.strip()]
    code = parts[0]
    for pattern, replacement in [*CHANGES.items(), *MORE_CHANGES.items()]:
        code, count = re.subn(pattern, replacement, code)
        if count > 1 or (count == 0 and pattern in CHANGES):
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
script = Path("train_gpt.py").resolve()
script.write_text(script_of(name, read_log(name)))
Path("logs").mkdir()
data = Path("data/fineweb10B")
write_tokens(data / "fineweb_train_000001.bin", TRAINING_TOKENS)
write_tokens(data / "fineweb_val_000000.bin", 10485760 + 2**22)
os.environ["TORCHINDUCTOR_SIZE_ASSERTS"] = "0"
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(os.environ["MEMTRACE_CACHE"]) / "inductor-empty")
compile_empty_kernels()
sys.argv = [str(script)]
table = run_script(script, options == ["nvidia-smi"])

[process] = re.findall(r"^\| +0 +N/A .* (\d+)MiB \|$", table, re.M)
[written] = Path("logs").glob("*.txt")
text = written.read_text()
PATTERNS = {
    "allocated": r"peak memory (?:allocated|consumption): (\d+) MiB",
    "reserved": r"MiB reserved: (\d+) MiB",
}
found = {what: re.search(pattern, text) for what, pattern in PATTERNS.items()}
peaks = {what: int(match[1]) << 20 for what, match in found.items() if match}
figure(name, **peaks, process=int(process) << 20)
