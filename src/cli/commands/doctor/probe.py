"""What `memtrace doctor` asks a Python: printed as JSON behind a line of its own.

Runs with the library preloaded. Whatever fails here is an answer too: nothing may stop the rest.
"""

import ctypes
import json
import os
import platform
import struct
import sys

TOLD = {}


def tell(name, ask):
    try:
        TOLD[name] = ask()
    except BaseException as error:
        TOLD.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]


def mapped():
    with open("/proc/self/maps") as maps:
        paths = {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
    return sorted(path for path in paths if ".so" in path)


def loaded(prefix):
    return [path for path in mapped() if os.path.basename(path).startswith(prefix)]


def has(library, symbol):
    found = loaded(library)
    return bool(found) and hasattr(ctypes.CDLL(found[0]), symbol)


def holds(library, text):
    """Is the text somewhere in the library?"""
    import mmap

    for path in loaded(library):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as bytes_:
            if bytes_.find(text) >= 0:
                return True
    return False


def subinterpreter():
    # The main interpreter's thread state comes first; a sub-interpreter says so since 3.13.
    try:
        import _interpreters

        return _interpreters.get_current()[0] != 0
    except ImportError:
        return False


SYMBOLS = {
    "blocks": ("libc10.so", "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE"),
    "ooms": ("libc10.so", "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE"),
    "host_tensors": ("libc10.so", "_ZN3c1022memoryProfilingEnabledEv"),
    "allocator": ("libc10_cuda.so", "_ZN3c104cuda20CUDACachingAllocator9allocatorE"),
    "streams": ("libc10_cuda.so", "_ZN3c104cuda20getCurrentCUDAStreamEa"),
    "ops": ("libtorch_cpu.so", "_ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE"),
    "op_names": ("libtorch_cpu.so", "_ZNK2at14RecordFunction4nameEv"),
    "sequence": ("libtorch_cpu.so", "_ZN2at15sequence_number4peekEv"),
}


def of_phantom(function):
    write = getattr(ctypes.CDLL(loaded("libmemtrace_phantom.so")[0]), function)
    text = ctypes.create_string_buffer(write(None, ctypes.c_size_t(0)) + 1)
    write(text, ctypes.c_size_t(len(text)))
    return text.value.decode()


FAMILIES = ("__cuda", "cuda", "cublas", "cudnn", "cusparse", "cusolver", "cufft", "curand", "nccl", "nvml")


def undefined(path):
    """The names of CUDA and its libraries that an ELF file leaves to others to define."""
    with open(path, "rb") as file:

        def at(place, size):
            file.seek(place)
            return file.read(size)

        head = struct.unpack("<16xHHIQQQIHHHHHH", at(0, 64))
        start, size, count = head[5], head[10], head[11]
        sections = [struct.unpack("<IIQQQQIIQQ", at(start + i * size, 64)) for i in range(count)]
        symbols = next((section for section in sections if section[1] == 11), None)  # SHT_DYNSYM
        if symbols is None:
            return set()
        texts = at(*sections[symbols[6]][4:6])
        names = set()
        for name, _, _, section, _, _ in struct.iter_unpack("<IBBHQQ", at(*symbols[4:6])):
            if section == 0 and name:
                names.add(texts[name : texts.index(b"\0", name)].decode(errors="replace"))
    return {name for name in names if name.startswith(FAMILIES) or (name[:2] == "cu" and name[2:3].isupper())}


def answers():
    """How the phantom answers each name, and what this torch wants that nobody answers."""
    kinds = {}
    for line in of_phantom("memtrace_phantom_answers").splitlines():
        kind, name = line.split(" ", 1)
        kinds.setdefault(kind, []).append(name)
    wanted = set()
    for path in mapped():
        if os.path.basename(path).startswith(("libtorch_cuda", "libc10_cuda")):
            wanted |= undefined(path)
    known = {name for kind, names in kinds.items() if kind != "passed" for name in names}
    passed = tuple(pattern[:-2] for pattern in kinds["passed"] if pattern.endswith(".*"))
    kinds["missing"] = sorted(n for n in wanted - known - set(kinds["passed"]) if not n.startswith(passed))
    kinds["wanted"] = sorted(wanted)
    return kinds


def train(torch):
    """A step of training whose trace is known: every hook has something to see."""
    model = torch.nn.Linear(1000, 10).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.cuda.nvtx.range_push("doctor")
    kept = torch.empty(1000, device="cuda")
    torch.cuda.nvtx.range_pop()
    with torch.cuda.stream(torch.cuda.Stream()):
        other = torch.empty(512, device="cuda")
    other.record_stream(torch.cuda.current_stream())
    del other
    model(torch.zeros(4, 1000, device="cuda")).sum().backward()
    optimizer.step()
    torch.cuda.synchronize()
    del kept
    torch.zeros(10).pin_memory()
    return True


def main():
    tell("python", lambda: [platform.python_implementation(), platform.python_version(), sys.executable])
    tell("libc", lambda: platform.libc_ver())
    tell("machine", lambda: [platform.system(), platform.machine()])
    tell("subinterpreter", subinterpreter)
    tell("preloaded", lambda: loaded("libmemtrace.so"))
    try:
        import torch
    except BaseException as error:
        TOLD["no_torch"] = f"{type(error).__name__}: {error}".splitlines()[0]
        return
    tell("torch", lambda: [torch.__version__, torch.version.cuda, torch.version.hip])
    tell("symbols", lambda: {name: has(*symbol) for name, symbol in SYMBOLS.items()})
    tell("cudart", lambda: loaded("libcudart.so"))
    tell(
        "nvtx",
        lambda: (
            "legacy"
            if loaded("libnvToolsExt")
            else "header"
            if holds("libtorch_python.so", b"NVTX_INJECTION64_PATH")
            or holds("libtorch_cuda.so", b"NVTX_INJECTION64_PATH")
            else "none"
        ),
    )
    tell("hooks", lambda: hasattr(torch.nn.modules.module, "register_module_forward_pre_hook"))
    tell("cuda", torch.cuda.is_available)
    if TOLD.get("cuda"):
        tell(
            "devices",
            lambda: [
                [torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory]
                for i in range(torch.cuda.device_count())
            ],
        )
        tell("backend", torch.cuda.get_allocator_backend)
        tell("trained", lambda: train(torch))

        def driver():
            number = ctypes.c_int()
            ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
            return f"{number.value // 1000}.{number.value % 1000 // 10}"

        tell("driver", driver)

        if loaded("libmemtrace_phantom.so"):
            tell("phantom", lambda: json.loads(of_phantom("memtrace_phantom_describe")))
            tell("answers", answers)
    if TOLD.get("preloaded"):
        tell("flushed", lambda: ctypes.CDLL(None).memtrace_flush())


main()
print("\nmemtrace-doctor " + json.dumps(TOLD), flush=True)
