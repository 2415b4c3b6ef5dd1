"""The steps whose device memory is measured, and the meter. For scripts/calibrate, which runs them apart."""

import ctypes
import os
import sys

from .calibrate_device import attributes, cudnn_description, driver, driver_attributes


class Meter:
    """Measures the device memory that this process uses outside of torch's allocator."""

    def __init__(self, torch, index):
        self.torch, self.index = torch, index
        try:
            self.nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError as error:
            sys.exit(f"NVML is missing ({error}); in a container, start it with the capability utility")
        self.must(self.nvml.nvmlInit_v2())
        self.handle = ctypes.c_void_p()
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        name = f"GPU-{uuid}".encode()
        if uuid is None or self.nvml.nvmlDeviceGetHandleByUUID(name, ctypes.byref(self.handle)):
            self.must(self.nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self.handle)))
        self.before = self.used()

    def must(self, status):
        if status:
            sys.exit(f"NVML failed with status {status}; is the driver installed?")

    def used(self):
        """Returns the bytes in use on the whole device."""
        memory = (ctypes.c_uint64 * 3)()
        self.must(self.nvml.nvmlDeviceGetMemoryInfo(self.handle, memory))
        return memory[2]

    def own(self):
        """Returns the bytes of this process on the device, or `None` if NVML does not report them, as in some
        containers."""

        class Process(ctypes.Structure):
            _fields_ = [
                ("pid", ctypes.c_uint),
                ("used", ctypes.c_uint64),
                ("gpu_instance", ctypes.c_uint),
                ("compute_instance", ctypes.c_uint),
            ]

        count, listed = ctypes.c_uint(256), (Process * 256)()
        ask = getattr(self.nvml, "nvmlDeviceGetComputeRunningProcesses_v3", None)
        if ask is None or ask(self.handle, ctypes.byref(count), listed):
            return None
        mine = [one.used for one in listed[: count.value] if one.pid == os.getpid()]
        # All bits set means that the driver does not report the size (WDDM).
        return mine[0] if mine and mine[0] != 2**64 - 1 else None

    def read(self):
        self.torch.cuda.synchronize(self.index)
        own = self.own()
        total = own if own is not None else self.used() - self.before
        return total - self.torch.cuda.memory_reserved(self.index)


def first_kernels(torch):
    value = torch.ones(64, 64, device="cuda", requires_grad=True)
    (torch.randn(64, 64, device="cuda") * value).sum().backward()


def captured_graph(torch):
    value = torch.zeros(1024, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            value = value + 1
    graph.replay()
    return graph


def linear(torch):
    ones = torch.ones(256, 256, device="cuda", dtype=torch.float16)
    return torch.nn.functional.linear(ones, ones, ones[0])


def sparse(torch):
    eye = torch.eye(64, device="cuda")
    return eye.to_sparse_csr() @ eye


STEPS = {
    "first kernels": first_kernels,
    "cublas": lambda torch: torch.ones(256, 256, device="cuda") @ torch.ones(256, 256, device="cuda"),
    "cublaslt": linear,
    "cudnn": lambda torch: torch.nn.Conv2d(8, 8, 3).cuda()(torch.ones(2, 8, 32, 32, device="cuda")),
    "cusolver": lambda torch: torch.linalg.cholesky(torch.eye(64, device="cuda")),
    "cufft": lambda torch: torch.fft.fft(torch.ones(1024, device="cuda")),
    "cusparse": sparse,
    "graph of 100 kernels": captured_graph,
}


def stages():
    import torch

    properties = torch.cuda.get_device_properties(0)
    meter = Meter(torch, 0)
    torch.cuda.set_device(0)
    total = torch.cuda.mem_get_info()[1]
    steps, last = {"context": meter.read()}, meter.read()
    for name, step in STEPS.items():
        try:
            keep = step(torch)
        except (RuntimeError, NotImplementedError) as error:
            steps[name] = None
            print(f"{name}: {error}", file=sys.stderr)
            continue
        now = meter.read()
        steps[name], last = now - last, now
        del keep
    return {
        "name": properties.name,
        "cc": [properties.major, properties.minor],
        "sms": properties.multi_processor_count,
        "total_bytes": total,
        "devices": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": driver(meter.nvml),
        "by_process": meter.own() is not None,
        "steps": steps,
        "driver_attributes": driver_attributes(),
        "cudnn_description": cudnn_description(torch),
        **attributes(torch),
    }


def communicators():
    import torch
    import torch.distributed as dist

    device = int(os.environ["LOCAL_RANK"])
    meter = Meter(torch, device)
    torch.cuda.set_device(device)
    first_kernels(torch)
    before = meter.read()
    dist.init_process_group("nccl")
    dist.barrier(device_ids=[device])
    first = meter.read()
    second = dist.new_group(backend="nccl")
    dist.barrier(group=second, device_ids=[device])
    both = meter.read()
    found = {
        "ranks": dist.get_world_size(),
        "communicator_bytes": first - before,
        "second_communicator_bytes": both - first,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    dist.destroy_process_group()
    return found
