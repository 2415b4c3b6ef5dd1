"""modded-nanogpt's speed records: the training scripts in their logs, on rank 0 of 8.

    modded_nanogpt.py RECORD

Each log has the whole script, and the peaks after the last step. The case takes the script from the log,
changes it as below, and runs it. It then reads the same lines in the log that the script wrote.

- Four training steps instead of thousands, on random tokens; the shapes of a step do not change.
- No coordinate descent in Inductor, which compiles each kernel many times to time it.
- No checks of strides in compiled code. The records before StableTorch describe a result of their own op with
  wrong strides, which PyTorch checks since 2.7.0.

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
    "MFUTweaks": (
        f"{SHORT}/2024-12-10_MFUTweaks/04df8c70-2462-4b6c-9e49-c7589b321a81.txt",
        "c127ab5d1d27e83adbdee2d3fd0a4731ca3f8be1",
    ),
    "SparsifyEmbeds": (
        f"{SHORT}/2024-12-17_SparsifyEmbeds/165384d5-5a41-4fba-9b79-8ecc372616ea.txt",
        "f112f6bc9b78b23c2ba8d97ff600e6a872d1a0a4",
    ),
    "SoftCap": (
        f"{SHORT}/2025-01-04_SoftCap/31d6c427-f1f7-4d8a-91be-a67b5dcd13fd.txt",
        "2fe2b58c63d0ac2279f77004ae0ab0d2e594a162",
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
    "StableTorch": (
        f"{SHORT}/2025-05-24_StableTorch/89d9f224-3b01-4581-966e-358d692335e0.txt",
        "7792ce1e9f41a2d7bb32453afb07d04bb1845730",
    ),
    "FasterReduce": (
        f"{SHORT}/2025-05-24_FasterReduce/23f40b75-06fb-4c3f-87a8-743524769a35.txt",
        "15129dbd3a686691dac60792a6b1848a0319211a",
    ),
    "EvenFasterReduce": (
        f"{SHORT}/2025-05-25_EvenFasterReduce/6ae86d05-5cb2-4e40-a512-63246fd08e45.txt",
        "f84ec3f969b9dc4645a18c2c04b8acaa5bc6e6df",
    ),
    "MuonWithAuxAdamExample": (
        f"{SHORT}/2025-05-25_MuonWithAuxAdamExample/b01550f9-03d8-4a9c-86fe-4ab434f1c5e0.txt",
        "0ff5f23333f0019426bada845dd8e1f8721ac21f",
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
    "medium-NewValemb": (
        f"{MEDIUM}/2025-08-28_Medium_NewValemb/036_61ef4351-7b68-4897-b440-a99221a1a629.txt",
        "79df72e2d5d93c7b9b3195a3b92622aa6c9b630e",
    ),
    "medium-GPT2MediumX01": (
        f"{MEDIUM}/2025-09-11_GPT2MediumX01/000_592014ec-6781-4f59-b274-c4af68ccfe75.txt",
        "b8a281e6f941225acf4b14afb89a1486736b515e",
    ),
    "medium-Snoo": (
        f"{MEDIUM}/2025-09-16_Snoo/000_01db7a67-f715-4114-a7b5-6bfe23bac1b1.txt",
        "b5ea6b4617c031ebd38e7aa6837274976e8873de",
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
# Changes to the script: a pattern that it contains once, and the replacement.
CHANGES = {
    r"(num_iterations(?: : int)? = )\d+": rf"\g<1>{STEPS}",
    r"(coordinate_descent_tuning = \(?\s*)True": r"\g<1>False",
}


def read_log(name: str) -> str:
    path, blob = RECORDS[name]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    kept = base / "memtrace/modded-nanogpt" / blob
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
        # The record SoftCap tunes nothing.
        if count != 1 and not (name == "SoftCap" and "tuning" in pattern):
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
write_tokens(data / "fineweb_train_000001.bin", (STEPS + 2) * 2**19)
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
