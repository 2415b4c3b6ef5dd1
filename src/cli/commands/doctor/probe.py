"""Questions of `memtrace doctor` to a Python, answered as one line of JSON.

Runs with the tracer preloaded. A question that fails is recorded as an error, and the others go on.
"""

import ctypes
import json
import os
import platform
import struct
import sys

ANSWERS = {}


def answer(name, ask):
    try:
        ANSWERS[name] = ask()
    except BaseException as error:
        ANSWERS.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]


def mapped_libraries():
    """The paths of the shared libraries in this process."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
    return sorted(path for path in paths if ".so" in path)


def loaded(prefix):
    """The loaded libraries of this name."""
    return [path for path in mapped_libraries() if os.path.basename(path).startswith(prefix)]


def exports(library, symbol):
    """Does the loaded library export the symbol?"""
    found = loaded(library)
    return bool(found) and hasattr(ctypes.CDLL(found[0]), symbol)


def contains(library, text):
    """Is the text somewhere in the file of the library?"""
    import mmap

    for path in loaded(library):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as bytes_:
            if bytes_.find(text) >= 0:
                return True
    return False


def is_subinterpreter():
    """Is this a subinterpreter? Known since Python 3.13."""
    try:
        import _interpreters

        return _interpreters.get_current()[0] != 0
    except ImportError:
        return False


def nvtx_flavour():
    """How this torch calls NVTX: through the legacy library, through its headers only, or not at all."""
    if loaded("libnvToolsExt"):
        return "legacy"
    libraries = ("libtorch_python.so", "libtorch_cuda.so")
    header_only = any(contains(library, b"NVTX_INJECTION64_PATH") for library in libraries)
    return "header" if header_only else "none"


# The symbols that the hooks need, as (library, mangled name).
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


def phantom_text(function):
    """The text that a function of the simulated GPU's library writes."""
    write = getattr(ctypes.CDLL(loaded("libmemtrace_phantom.so")[0]), function)
    text = ctypes.create_string_buffer(write(None, ctypes.c_size_t(0)) + 1)
    write(text, ctypes.c_size_t(len(text)))
    return text.value.decode()


# The prefixes of the functions of CUDA and its libraries; `cu` is checked apart.
FAMILIES = ("__cuda", "cuda", "cublas", "cudnn", "cusparse", "cusolver", "cufft", "curand", "nccl", "nvml")


def imported(path):
    """The functions of CUDA and its libraries that an ELF file imports."""
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


def phantom_answers():
    """The functions by how the simulated GPU answers them, and those that torch imports and it lacks."""
    kinds = {}
    for line in phantom_text("memtrace_phantom_answers").splitlines():
        kind, name = line.split(" ", 1)
        kinds.setdefault(kind, []).append(name)
    wanted = set()
    for path in mapped_libraries():
        if os.path.basename(path).startswith(("libtorch_cuda", "libc10_cuda")):
            wanted |= imported(path)
    known = {name for kind, names in kinds.items() if kind != "passed" for name in names}
    passed = tuple(pattern[:-2] for pattern in kinds["passed"] if pattern.endswith(".*"))
    kinds["missing"] = sorted(n for n in wanted - known - set(kinds["passed"]) if not n.startswith(passed))
    kinds["wanted"] = sorted(wanted)
    return kinds


def train(torch):
    """A training step that gives every hook an event."""
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
    answer("python", lambda: [platform.python_implementation(), platform.python_version(), sys.executable])
    answer("libc", lambda: platform.libc_ver())
    answer("machine", lambda: [platform.system(), platform.machine()])
    answer("subinterpreter", is_subinterpreter)
    answer("preloaded", lambda: loaded("libmemtrace.so"))
    try:
        import torch
    except BaseException as error:
        ANSWERS["no_torch"] = f"{type(error).__name__}: {error}".splitlines()[0]
        return
    answer("torch", lambda: [torch.__version__, torch.version.cuda, torch.version.hip])
    answer("symbols", lambda: {name: exports(*symbol) for name, symbol in SYMBOLS.items()})
    answer("cudart", lambda: loaded("libcudart.so"))
    answer("nvtx", nvtx_flavour)
    answer("hooks", lambda: hasattr(torch.nn.modules.module, "register_module_forward_pre_hook"))
    answer("cuda", torch.cuda.is_available)
    if ANSWERS.get("cuda"):
        answer(
            "devices",
            lambda: [
                [torch.cuda.get_device_name(i), torch.cuda.get_device_properties(i).total_memory]
                for i in range(torch.cuda.device_count())
            ],
        )
        answer("backend", torch.cuda.get_allocator_backend)
        answer("trained", lambda: train(torch))

        def driver():
            number = ctypes.c_int()
            ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
            return f"{number.value // 1000}.{number.value % 1000 // 10}"

        answer("driver", driver)

        if loaded("libmemtrace_phantom.so"):
            answer("phantom", lambda: json.loads(phantom_text("memtrace_phantom_describe")))
            answer("answers", phantom_answers)
    if ANSWERS.get("preloaded"):
        answer("flushed", lambda: ctypes.CDLL(None).memtrace_flush())


main()
print("\nmemtrace-doctor " + json.dumps(ANSWERS), flush=True)
