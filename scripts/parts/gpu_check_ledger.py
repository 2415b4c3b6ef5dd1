"""Compares `memtrace ledger` with nvidia-smi and the driver; a part of gpu-check."""

import csv
import json
import sys

MIB = 1 << 20
STEPS = ["cublas", "cudnn", "nccl", "graph", "expandable"]
# nvidia-smi rounds to MiB, and its sample is a few ms apart from memtrace's.
TOLERANCE = 4 * MIB


def check(checks, script):
    """Runs each step in its own process, and compares the ledger of its trace with the driver's figures."""
    for how in STEPS:
        problem, detail = step(checks, script, how)
        checks.report(f"ledger: {how}", problem, detail)


def step(checks, script, how):
    trace = checks.folder / f"ledger {how}"
    env = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if how == "expandable" else {}
    done = checks.run([sys.executable, script, how], trace, **env)
    files = list(trace.glob("*.csv"))
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(files) != 1 or len(lines) < 1:
        return f"exit status {done.returncode}, traces {files}\n{done.stdout}{done.stderr}", ""
    figures = json.loads(lines[0])
    with open(files[0], newline="", encoding="utf-8") as file:
        moment = next(row["ts_ns"] for row in csv.DictReader(file) if row["name"] == "counted")
    answer = checks.run(
        [checks.target / "memtrace", "ledger", files[0], "--json", "--device", "0", "--at", f"{moment}ns"]
    )
    if answer.returncode:
        return answer.stdout + answer.stderr, ""
    device = json.loads(answer.stdout)["devices"][0]
    rows = {}
    for row in device["rows"]:
        rows[row["group"]] = rows.get(row["group"], 0) + row["bytes"]
    problems = []

    def same(what, found, expected):
        if expected is not None and abs(found - expected) > TOLERANCE:
            problems.append(f"{what}: the ledger has {found / MIB:.1f} MiB, expected {expected / MIB:.1f}")

    in_bytes = lambda mib: None if mib is None else mib * MIB
    same("used, by nvidia-smi", device["used_bytes"], in_bytes(figures["smi_used_mib"]))
    # cudaMemGetInfo may count the driver's reserve as used memory. It does so only where its total
    # memory differs from NVML's.
    if device["total_bytes"] == figures["total"]:
        same("used, by cudaMemGetInfo", device["used_bytes"], figures["total"] - figures["free"])
    if figures["smi_own_mib"] is not None and device["looked_process_bytes"] >= 0:
        same("this process, by nvidia-smi", device["looked_process_bytes"], in_bytes(figures["smi_own_mib"]))
    if how == "expandable" and "segment_map" not in files[0].read_text(encoding="utf-8"):
        problems.append("no segment_map row")
    if problems:
        problems.append(json.dumps(device["rows"], indent=1))
    shown = ", ".join(f"{group} {bytes_ / MIB:.0f}" for group, bytes_ in rows.items())
    return "\n".join(problems), f"{device['used_bytes'] / MIB:.0f} MiB: {shown}"
