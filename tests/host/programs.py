"""Small programs that hold the host's memory in different ways, for scripts/host-corpus.

    python programs.py NAME                # stops at points and prints what the kernel counts there
    python programs.py NAME --until-killed # goes on until something ends it

At a point the trace is flushed, which takes a full sample, and the kernel's own figures are printed as a line
`POINT {json}`. All programs run on the CPU, or on a simulated GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import itertools
import json
import mmap
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

MIB = 1 << 20
GROUP = Path("/sys/fs/cgroup")
POINTS = 20
TRIES = 8
SETTLE = 20  # the most tenths of a second that a point waits for threads that still work
points = itertools.count()
args = argparse.Namespace(until_killed=False)
kept: list = []


def figures(file: str) -> dict[str, int]:
    """Returns the lines `Name: 123 kB` of a file of /proc, in bytes."""
    lines = (line.split() for line in Path(file).read_text().splitlines())
    return {words[0][:-1]: int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def kernel_figures() -> dict[str, int]:
    """Returns PSS and RSS of this process, and the use of its version 1 control group if there is one."""
    rollup = figures("/proc/self/smaps_rollup")
    found = {"pss": rollup["Pss"], "rss": rollup["Rss"]}
    own = [line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line]
    if own:
        folder = GROUP / "memory" / own[0].split(":", 2)[2].lstrip("/")
        found["group"] = int((folder / "memory.usage_in_bytes").read_text())
    return found


def settle() -> None:
    """Waits until resident memory is constant for a tenth of a second, but at most SETTLE tenths. Threads of
    a DataLoader fetch batches; memory that they take and return between two readings is in neither."""
    for _ in range(SETTLE):
        before = figures("/proc/self/smaps_rollup")["Rss"]
        time.sleep(0.1)
        if figures("/proc/self/smaps_rollup")["Rss"] == before:
            return


def point() -> bool:
    """Takes a sample and prints the kernel's figures. Returns False if this was the last point.

    The sample is taken between two readings of the kernel's figures. If these differ, because of the
    program's threads or of other programs that map the same libraries, the point is taken again."""
    number = next(points)
    if args.until_killed:
        return True
    settle()
    for _ in range(TRIES):
        before = kernel_figures()
        is_flushed = ctypes.CDLL(None).memtrace_flush() == 0
        unix_ns = time.time_ns()
        after = kernel_figures()
        if is_flushed and abs(after["pss"] - before["pss"]) < after["pss"] / 1000:
            break
    ranges = {key: sorted([before[key], after[key]]) for key in after}
    print("POINT", json.dumps({"unix_ns": unix_ns, **ranges}), flush=True)
    return number + 1 < POINTS


def model(width: int = 1024, depth: int = 6) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])


def use_device() -> None:
    """Allocates memory of a device, because tracing begins with the first such allocation."""
    kept.append(torch.zeros(1, device="cuda"))


def cpu_training() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    while True:
        net(torch.randn(256, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not point():
            return


class Images(Dataset):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 256, 256), float(index % 7))


def loader(context: str) -> None:
    use_device()
    data = DataLoader(
        Images(), batch_size=16, num_workers=4, pin_memory=True, multiprocessing_context=context
    )
    for batch in data:
        batch.to("cuda", non_blocking=True)
        if not point():
            return


def loader_fork() -> None:
    loader("fork")


def loader_spawn() -> None:
    loader("spawn")


def optimizer_offload() -> None:
    """ZeRO-Offload by hand: the optimizer and pinned copies of the gradients live on the host."""
    net = model().cuda()
    host = [parameter.detach().cpu().pin_memory().requires_grad_() for parameter in net.parameters()]
    optimizer = torch.optim.AdamW(host)
    while True:
        net(torch.randn(64, 1024, device="cuda")).sum().backward()
        for copy, parameter in zip(host, net.parameters(), strict=True):
            copy.grad = parameter.grad.cpu()
            parameter.grad = None
        optimizer.step()
        for copy, parameter in zip(host, net.parameters(), strict=True):
            parameter.data.copy_(copy.data)
        if not point():
            return


def pipeline_offload() -> None:
    """A diffusion pipeline: each part comes to the GPU and goes back to the host."""
    parts = [model(1024, 8) for _ in range(3)]
    use_device()
    while True:
        for part in parts:
            part.cuda()
            part(torch.randn(4, 1024, device="cuda"))
            part.cpu()
            if not point():
                return


def mapped_weights() -> None:
    use_device()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.pt"
        torch.save(model(2048, 6).state_dict(), file)
        state = torch.load(file, mmap=True)
        for _ in range(4):
            for tensor in state.values():
                tensor.sum()
                if not point():
                    return


def checkpoint() -> None:
    """Gathers the state on the host and writes it, as a full checkpoint does."""
    net = model(2048, 6).cuda()
    while True:
        gathered = {name: value.cpu() + 1 for name, value in net.state_dict().items()}
        point()
        torch.save(gathered, buffer := io.BytesIO())
        kept[:] = [gathered, buffer] if not args.until_killed else [*kept, gathered, buffer]
        if not point():
            return


def leak_tensors() -> None:
    use_device()
    while True:
        kept.append(torch.ones(16 * MIB, dtype=torch.uint8))
        time.sleep(0.05)
        if not point():
            return


def leak_lists() -> None:
    use_device()
    while True:
        kept.append([float(number) for number in range(300_000)])
        if not point():
            return


def reads(items: list, pipe) -> None:
    """Reads Python objects: each read changes a reference count, so the page is copied."""
    for chunk in range(0, len(items), 100_000):
        sum(items[chunk : chunk + 100_000])
        time.sleep(0.05)
    pipe.recv()


def forked_list() -> None:
    use_device()
    items = list(range(1000, 2_000_000))
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe() for _ in range(4)]
    workers = [fork.Process(target=reads, args=(items, theirs), daemon=True) for _, theirs in pipes]
    for worker in workers:
        worker.start()
    while point():
        time.sleep(0.1)
    for ours, _ in pipes:
        ours.send(0)


def arenas() -> None:
    """Runs threads that allocate and free small objects, whose malloc arenas stay."""
    use_device()
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]

    def work() -> None:
        blocks = [libc.malloc(60_000) for _ in range(400)]
        for block in blocks:
            ctypes.memset(block, 1, 60_000)
        last = blocks.pop()
        for block in blocks:
            libc.free(block)
        kept.append(last)

    while True:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not point():
            return


def shared_tensors() -> None:
    use_device()
    while True:
        kept.append(torch.ones(8 * MIB, dtype=torch.uint8).share_memory_())
        if not point():
            return


def pinned_rounding() -> None:
    use_device()
    while True:
        kept.append(torch.ones(9 * MIB, dtype=torch.uint8).pin_memory())
        if not point():
            return


def mapped_array() -> None:
    """Reads and writes a file through a map: page cache, clean and dirty."""
    use_device()
    with tempfile.TemporaryFile() as file:
        file.truncate(400 * MIB)
        data = mmap.mmap(file.fileno(), 0)
        step = 400 * MIB // POINTS
        for start in range(0, 400 * MIB, step):
            for page in range(start, start + step, 4096):
                data[page] = 1
            if not point():
                return


def registered() -> None:
    """Registers memory of the program with CUDA."""
    use_device()
    runtime = torch.cuda.cudart()
    while True:
        tensor = torch.ones(8 * MIB, dtype=torch.uint8)
        runtime.cudaHostRegister(tensor.data_ptr(), tensor.numel(), 0)
        kept.append(tensor)
        if not point():
            return


def many_children() -> None:
    use_device()
    fork = multiprocessing.get_context("fork")
    workers = [fork.Process(target=time.sleep, args=(600,), daemon=True) for _ in range(60)]
    for number, worker in enumerate(workers):
        worker.start()
        if number > 30:
            # A child may end while memtrace reads it.
            workers[number - 31].terminate()
        if number % 3 == 0 and not point():
            return


def join(file: str, rank: int, ranks: int) -> None:
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{file}", rank=rank, world_size=ranks
    )


def fsdp_offload() -> None:
    """FSDP2 with parameters, gradients and optimizer state on the host."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    with tempfile.TemporaryDirectory() as folder:
        join(f"{folder}/ranks", 0, 1)
        net = model(1024, 8)
        for layer in net:
            fully_shard(layer, offload_policy=CPUOffloadPolicy())
        fully_shard(net, offload_policy=CPUOffloadPolicy())
        optimizer = torch.optim.AdamW(net.parameters())
        while True:
            net(torch.randn(64, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if not point():
                break
        torch.distributed.destroy_process_group()


def device_map_auto() -> None:
    """accelerate places on the host what exceeds the `max_memory` of the GPU."""
    from accelerate import dispatch_model, infer_auto_device_map

    net = model(1024, 16).eval()
    placed = infer_auto_device_map(net, max_memory={0: 20 * MIB, "cpu": 1024 * MIB})
    assert {0, "cpu"} <= set(placed.values()), placed
    net = dispatch_model(net, placed)
    while True:
        with torch.no_grad():
            net(torch.randn(64, 1024, device="cuda"))
        if not point():
            return


def diffusers_offload() -> None:
    """A pipeline of diffusers whose parts are on the GPU only while they run."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL(
            block_out_channels=(64, 128),
            norm_num_groups=8,
            latent_channels=4,
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        unet=UNet2DConditionModel(
            sample_size=16,
            block_out_channels=(256, 512),
            norm_num_groups=8,
            cross_attention_dim=64,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        scheduler=DDIMScheduler(),
        text_encoder=None,
        tokenizer=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    pipeline.enable_model_cpu_offload()
    while True:
        text = torch.randn(1, 16, 64, device="cuda")
        pipeline(prompt_embeds=text, negative_prompt_embeds=text, num_inference_steps=2, output_type="pt")
        if not point():
            return


def gathers(file: str, rank: int, saves: int) -> None:
    """One of four ranks that share a model. The full state is gathered on the host of rank 0."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    join(file, rank, 4)
    net = model(2048, 6).cuda()
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for _ in range(saves):
        state = get_model_state_dict(net, options=options)
        kept[:] = [state] if not args.until_killed else [*kept, state]
        if rank == 0:
            point()
    torch.distributed.destroy_process_group()


def gathered_checkpoint() -> None:
    saves = 1 << 20 if args.until_killed else POINTS
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/ranks"
        others = [spawn.Process(target=gathers, args=(file, rank, saves)) for rank in range(1, 4)]
        for other in others:
            other.start()
        gathers(file, 0, saves)
        for other in others:
            other.join()


def vllm_offload() -> None:
    """vLLM with part of the weights on the host."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts/parts"))
    from serving_engine import write_model
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "qwen2.5-0.5b")
        engine = LLM(
            model=folder, load_format="dummy", cpu_offload_gb=0.5, max_model_len=512, enforce_eager=True
        )
        sampling = SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False)
        while True:
            engine.generate([{"prompt_token_ids": list(range(5, 37))}], sampling, use_tqdm=False)
            if not point():
                return


# Programs that end, some of them because memory runs out.


def wait() -> None:
    use_device()
    print("READY", flush=True)
    while True:
        kept[:] = [torch.ones(MIB)]
        time.sleep(0.05)


NEIGHBOUR = f"""
import pathlib, sys, time
blocks = []
while pathlib.Path("/proc", sys.argv[1]).exists():
    blocks.append(b"x" * {16 * MIB})
    time.sleep(0.05)
"""


def neighbour() -> None:
    """Another process of the container takes its memory. The kernel kills this one, which asks for it."""
    use_device()
    own = str(os.getpid())
    if os.fork() == 0:
        # The child of a child that has ended is not a descendant of this process. Without its environment, it
        # does not belong to the traced job.
        if os.fork() == 0:
            os.execve(sys.executable, [sys.executable, "-c", NEIGHBOUR, own], {})
        os._exit(0)
    os.wait()
    Path("/proc/self/oom_score_adj").write_text("1000")
    while True:
        kept[:] = [torch.ones(MIB)]
        time.sleep(0.05)


def processor_time() -> None:
    use_device()
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 3, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    while True:
        sum(range(100_000))


def watchdog() -> None:
    use_device()
    time.sleep(1)
    os.abort()


def full_shm() -> None:
    """Writes more shared memory than the small file system in the folder SMALL_SHM has."""
    use_device()
    with open(Path(os.environ["SMALL_SHM"]) / "torch_1", "w+b") as file:
        file.truncate(64 * MIB)
        data = mmap.mmap(file.fileno(), 0)
        for page in range(0, 64 * MIB, 4096):
            data[page] = 1


def asked_to_end() -> None:
    """Goes on when SIGTERM asks it to end: it still writes a checkpoint."""
    signal.signal(signal.SIGTERM, lambda *_: print("saving", flush=True))
    wait()


def loads_weights() -> None:
    """Reads checkpoints into memory, one after the other, and keeps them all, in addition to the model."""
    use_device()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.pt"
        net = model(2048, 8)
        torch.save(net.state_dict(), file)
        while True:
            kept.append(torch.load(file))
            net.load_state_dict(kept[-1])


def saves_checkpoint() -> None:
    """Trains some steps, and then copies the state of the GPU to the host and writes it into memory."""
    net = model(4096, 8).cuda()
    optimizer = torch.optim.SGD(net.parameters())
    for _ in range(5):
        net(torch.randn(8, 4096, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.2)
    with torch.cuda.nvtx.range("phase:checkpoint"):
        gathered = {name: value.cpu() + 1 for name, value in net.state_dict().items()}
        torch.save(gathered, io.BytesIO())


def rank_grows() -> None:
    """Two ranks; the second leaks CPU tensors until the kernel kills it."""
    use_device()
    while True:
        if os.environ["RANK"] == "1":
            kept.append(torch.ones(16 * MIB, dtype=torch.uint8))
        time.sleep(0.05)


def address_space() -> None:
    """Asks for more memory than the limit of its address space allows, and does not catch the error."""
    use_device()
    size = figures("/proc/self/status")["VmSize"]
    resource.setrlimit(resource.RLIMIT_AS, (size + 600 * MIB, resource.RLIM_INFINITY))
    while True:
        kept.append(bytearray(64 * MIB))
        time.sleep(0.02)


class Growing(Dataset):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> torch.Tensor:
        kept.append(torch.ones(4 * MIB, dtype=torch.uint8))
        time.sleep(0.02)
        return torch.zeros(1)


def worker_grows() -> None:
    use_device()
    for _ in DataLoader(Growing(), batch_size=4, num_workers=1):
        pass


PROGRAMS = [
    cpu_training, loader_fork, loader_spawn, optimizer_offload, pipeline_offload, mapped_weights, checkpoint,
    leak_tensors, leak_lists, forked_list, arenas, shared_tensors, pinned_rounding, mapped_array, registered,
    many_children, fsdp_offload, device_map_auto, diffusers_offload, gathered_checkpoint, vllm_offload,
]  # fmt: skip
ENDING = [
    wait, neighbour, processor_time, watchdog, full_shm, worker_grows, asked_to_end, loads_weights,
    saves_checkpoint, rank_grows, address_space,
]  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--until-killed", action="store_true")
    parser.parse_args(namespace=args)
    next(program for program in PROGRAMS + ENDING if program.__name__ == args.name)()
