"""Checks nvidia-smi and pynvml on a phantom of two cards: against torch, between processes, after a kill.

Run it under `memtrace run --phantom 2xa10`. It prints the bytes in use on card 0 at the moments that the
caller compares with the trace.
"""

import os
import signal
import subprocess
import sys
import time

import pynvml
import torch

MIB = 1 << 20


def smi(*arguments, status=0):
    done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True)
    assert done.returncode == status, (arguments, done)
    return done.stdout


def child():
    """Takes 8 GiB of the card that the parent process made visible, and waits to be killed."""
    block = torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
    print(block.numel(), flush=True)
    time.sleep(60)


def used(handle):
    first = pynvml.nvmlDeviceGetMemoryInfo(handle)
    second = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    assert first.used == second.used == first.total - first.free and second.reserved == 0
    return first.used


def processes(handle):
    return {each.pid: each.usedGpuMemory for each in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}


def queried(fields, *more):
    lines = smi(f"--query-gpu={fields}", "--format=csv,noheader,nounits", *more).splitlines()
    return [line.split(", ") for line in lines]


def apps():
    lines = smi("--query-compute-apps=pid,gpu_uuid,used_memory", "--format=csv,noheader,nounits").splitlines()
    return [line.split(", ") for line in lines]


def main():
    pynvml.nvmlInit()
    cards = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    assert len(cards) == 2 and pynvml.nvmlDeviceGetName(cards[1]) == "NVIDIA A10"
    uuids = [pynvml.nvmlDeviceGetUUID(card) for card in cards]
    assert queried("uuid") == [[uuid] for uuid in uuids]
    # Before the first use of CUDA nothing is in use.
    assert [used(card) for card in cards] == [0, 0] and not apps()
    assert "No running processes found" in smi()

    block = torch.zeros(256 * MIB, dtype=torch.uint8, device="cuda")
    free, total = torch.cuda.mem_get_info()
    mine = total - free
    assert mine > 256 * MIB and used(cards[0]) == mine and used(cards[1]) == 0
    assert processes(cards[0]) == {os.getpid(): mine} and processes(cards[1]) == {}
    assert queried("index,memory.used,memory.free,memory.total") == [
        ["0", str(mine // MIB), str(total // MIB - mine // MIB), str(total // MIB)],
        ["1", "0", str(total // MIB), str(total // MIB)],
    ]
    assert apps() == [[str(os.getpid()), uuids[0], str(mine // MIB)]]
    assert torch.cuda.device_memory_used() == mine
    assert 0 <= pynvml.nvmlDeviceGetUtilizationRates(cards[0]).gpu <= 100
    print(mine, flush=True)
    # Wait for about twenty samples of the trace: on a busy machine some come late.
    time.sleep(1)

    # Another process on the same card, which is the only card that it sees.
    for visible, card in (("0", 0), ("1", 1), (uuids[1], 1)):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
        with subprocess.Popen(
            [sys.executable, __file__, "child"], env=environment, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout.readline() == f"{8 << 30}\n"
            theirs = processes(cards[card])[other.pid]
            # Asking for the free memory of card 1 makes a context there.
            left = torch.cuda.mem_get_info(card)[0]
            together = sum(processes(cards[card]).values())
            assert theirs > 8 << 30 and used(cards[card]) == together == total - left
            assert [str(other.pid), uuids[card], str(theirs // MIB)] in apps()
            if card == 0:
                # Memory that the other process holds cannot be allocated.
                size = free - (4 << 30)
                try:
                    torch.empty(size, dtype=torch.uint8, device="cuda")
                    raise AssertionError("the memory of another process was given out")
                except torch.OutOfMemoryError as error:
                    assert f"Process {other.pid} has" in str(error), error
            other.send_signal(signal.SIGKILL)
            # The memory is free although nobody has waited for the killed process yet.
            for _ in range(200):
                if other.pid not in processes(cards[card]):
                    break
                time.sleep(0.01)
            assert other.pid not in processes(cards[card]) and str(other.pid) not in str(apps())
            if card == 0:
                assert torch.cuda.mem_get_info()[0] == free == total - used(cards[0])
                torch.empty(size, dtype=torch.uint8, device="cuda")
                torch.cuda.empty_cache()

    screen = smi()
    assert "NVIDIA A10" in screen and str(os.getpid()) in screen and f"{mine // MIB}MiB" in screen
    listed = smi("-L").splitlines()
    assert listed == [f"GPU {index}: NVIDIA A10 (UUID: {uuid})" for index, uuid in enumerate(uuids)]
    assert f"{mine // MIB} MiB" in smi("-q", "-d", "MEMORY")
    header = smi("--query-gpu=gpu_name,memory.used,temperature.gpu", "--format=csv", "-i", "1").splitlines()
    assert header == ["name, memory.used [MiB], temperature.gpu", header[1]] and header[1].endswith("[N/A]")
    refused = smi("--query-gpu=name,cuda_version", "--format=csv", status=2)
    assert refused.startswith('Field "cuda_version" is not a valid field to query.')
    assert smi("-i", "7", "-L", status=6) == "No devices were found\n"
    try:
        pynvml.nvmlDeviceGetTemperature(cards[0], pynvml.NVML_TEMPERATURE_GPU)
        raise AssertionError("a simulated card has a temperature")
    except pynvml.NVMLError_NotSupported:
        pass
    pynvml.nvmlShutdown()
    print(block.numel())


child() if sys.argv[1:] == ["child"] else main()
