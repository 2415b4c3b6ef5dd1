"""Collects what `memtrace doctor` needs to know about a Python, and prints it as one line of JSON.

Runs in that Python with the library preloaded. If a check fails, the error is recorded under "errors", and
the other checks still run.
"""

import ctypes
import json
import os
import platform
import struct
import sys

# The results of the checks, by the names that src/cli/commands/doctor reads.
FACTS = {}


def describe(error):
    """Returns the class of an exception and the first line of its message."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def record(name, check):
    """Runs a check and stores its result or its error. A module that fails to load may
    even raise SystemExit."""
    try:
        FACTS[name] = check()
    except BaseException as error:
        FACTS.setdefault("errors", {})[name] = describe(error)[:300]


def mapped_libraries():
    """Returns the paths of the shared libraries in this process."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
    return sorted(path for path in paths if ".so" in path)


def loaded(prefix):
    """Returns the paths of the loaded libraries whose file names start with the prefix."""
    return [path for path in mapped_libraries() if os.path.basename(path).startswith(prefix)]


def has_symbol(library, symbol):
    """Returns True if a loaded library exports a symbol."""
    found = loaded(library)
    return bool(found) and hasattr(ctypes.CDLL(found[0]), symbol)


def contains(library, text):
    """Returns True if the file of a loaded library contains a text."""
    import mmap

    for path in loaded(library):
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as bytes_:
            if bytes_.find(text) >= 0:
                return True
    return False


def is_subinterpreter():
    """Returns True outside the main interpreter; always False before Python 3.13, which cannot tell."""
    try:
        import _interpreters

        return _interpreters.get_current()[0] != 0
    except ImportError:
        return False


# The symbols that memtrace needs from torch: by purpose, a library and a symbol in it.
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


def text_from_phantom(function):
    """Returns the text that a function of the simulated GPU's library writes into a buffer."""
    write = getattr(ctypes.CDLL(loaded("libmemtrace_phantom.so")[0]), function)
    text = ctypes.create_string_buffer(write(None, ctypes.c_size_t(0)) + 1)
    write(text, ctypes.c_size_t(len(text)))
    return text.value.decode()


# The prefixes of the functions of CUDA and its libraries.
FAMILIES = ("__cuda", "cuda", "cublas", "cudnn", "cusparse", "cusolver", "cufft", "curand", "nccl", "nvml")


def undefined_symbols(path):
    """Returns the undefined symbols of an ELF file that belong to CUDA or one of its libraries."""
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


def phantom_calls():
    """Returns the phantom's functions by the kind of their answer, and the functions that torch needs
    but the phantom lacks."""
    kinds = {}
    for line in text_from_phantom("memtrace_phantom_answers").splitlines():
        kind, name = line.split(" ", 1)
        kinds.setdefault(kind, []).append(name)
    wanted = set()
    for path in mapped_libraries():
        if os.path.basename(path).startswith(("libtorch_cuda", "libc10_cuda")):
            wanted |= undefined_symbols(path)
    known = {name for kind, names in kinds.items() if kind != "passed" for name in names}
    passed = tuple(pattern[:-2] for pattern in kinds["passed"] if pattern.endswith(".*"))
    kinds["missing"] = sorted(n for n in wanted - known - set(kinds["passed"]) if not n.startswith(passed))
    kinds["wanted"] = sorted(wanted)
    return kinds


def train(torch):
    """Trains one step in which each hook has something to record, so that the trace is known."""
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


def nvtx_kind():
    """Returns how this torch calls NVTX: `legacy` (the old library), `header` (the
    header-only version) or `none`."""
    if loaded("libnvToolsExt"):
        return "legacy"
    libraries = ("libtorch_python.so", "libtorch_cuda.so")
    return "header" if any(contains(library, b"NVTX_INJECTION64_PATH") for library in libraries) else "none"


def devices(torch):
    """Returns the name and the memory in bytes of each device."""
    count = torch.cuda.device_count()
    properties = [torch.cuda.get_device_properties(ordinal) for ordinal in range(count)]
    return [[torch.cuda.get_device_name(i), found.total_memory] for i, found in enumerate(properties)]


def driver_version():
    """Returns the version of CUDA that the driver supports, such as `12.4`."""
    number = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}"


def main():
    record("python", lambda: [platform.python_implementation(), platform.python_version(), sys.executable])
    record("libc", platform.libc_ver)
    record("machine", lambda: [platform.system(), platform.machine()])
    record("subinterpreter", is_subinterpreter)
    record("preloaded", lambda: loaded("libmemtrace.so"))
    try:
        import torch
    except BaseException as error:
        FACTS["no_torch"] = describe(error)
        return
    record("torch", lambda: [torch.__version__, torch.version.cuda, torch.version.hip])
    record("symbols", lambda: {name: has_symbol(*symbol) for name, symbol in SYMBOLS.items()})
    record("cudart", lambda: loaded("libcudart.so"))
    record("nvtx", nvtx_kind)
    record("hooks", lambda: hasattr(torch.nn.modules.module, "register_module_forward_pre_hook"))
    record("cuda", torch.cuda.is_available)
    if FACTS.get("cuda"):
        record("devices", lambda: devices(torch))
        record("backend", torch.cuda.get_allocator_backend)
        record("trained", lambda: train(torch))
        record("driver", driver_version)
        if loaded("libmemtrace_phantom.so"):
            record("phantom", lambda: json.loads(text_from_phantom("memtrace_phantom_describe")))
            record("answers", phantom_calls)
    if FACTS.get("preloaded"):
        record("flushed", lambda: ctypes.CDLL(None).memtrace_flush())


main()
print("\nmemtrace-doctor " + json.dumps(FACTS), flush=True)
