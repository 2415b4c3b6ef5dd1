"""Repeats the requests of a trace, once for each setting of PyTorch's caching allocator.

usage: replay.py REQUESTS PLAN

REQUESTS has four 64-bit integers for each operation (src/analysis/requests). PLAN is JSON. Prints a line of
JSON for each setting. Each setting has a process of its own, because the allocator reads its settings once.
The processes are forks of one process that has imported torch, because the import takes longest.
"""

import ctypes
import json
import os
import sys
import traceback

ALLOC, FREE, FAILED, EMPTY_CACHE, OUTSIDE_ALLOC, OUTSIDE_FREE, POOL, STEP, RESERVED, RELEASE = range(10)
# The variable has two names. torch 2.10 and later read the newer one, PYTORCH_ALLOC_CONF, first.
CONF_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


class Runtime:
    """The CUDA runtime that torch uses, for memory outside of its allocator and for streams."""

    def __init__(self):
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if "libcudart" in line}
        self.library = ctypes.CDLL(sorted(paths)[0])

    def call(self, name, *arguments):
        """Returns the status of a call of the runtime."""
        return getattr(self.library, name)(*arguments)

    def alloc(self, size):
        """Allocates device memory. Returns its address, or 0 if the allocation failed."""
        address = ctypes.c_void_p()
        failed = self.call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(size))
        return 0 if failed else address.value

    def free(self, address):
        """Frees the memory at an address that `alloc` returned."""
        self.call("cudaFree", ctypes.c_void_p(address))

    def stream(self):
        """Returns a new stream."""
        stream = ctypes.c_void_p()
        self.call("cudaStreamCreate", ctypes.byref(stream))
        return stream.value

    def free_bytes(self):
        """Returns the free memory of the device, in bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value


class Pools:
    """Directs requests to the private pools of graphs and of `torch.cuda.MemPool`."""

    def __init__(self, torch):
        own = torch._C
        # torch 2.1 and 2.2 can only direct the requests of the current stream to a pool.
        # Later versions direct the requests of all streams.
        self.begin = (
            getattr(own, "_cuda_beginAllocateToPool", None) or own._cuda_beginAllocateCurrentStreamToPool
        )
        end = (
            "_cuda_endAllocateToPool"
            if hasattr(own, "_cuda_endAllocateToPool")
            else "_cuda_endAllocateCurrentStreamToPool"
        )
        self.end = getattr(own, end)
        self.give_back = own._cuda_releasePool
        self.handle = torch.cuda.graph_pool_handle
        self.handles = {}
        self.uses = {}
        self.current = None

    def use(self, number):
        """Directs the next requests to the pool `number`; 0 is the default pool."""
        if self.current is not None:
            self.end(0, self.current)
        self.current = None
        if number:
            self.current = self.handles.setdefault(number, self.handle())
            self.uses[number] = self.uses.get(number, 0) + 1
            self.begin(0, self.current)

    def release(self, number):
        """Ends a pool, so that the allocator may return its segments."""
        if self.current == self.handles.get(number):
            self.use(0)
        handle = self.handles.pop(number, None)
        for _ in range(self.uses.pop(number, 0)):
            self.give_back(0, handle)


class Replay:
    """Repeats the requests with the allocator settings of this process."""

    def __init__(self, torch, plan):
        self.torch = torch
        torch.cuda.init()
        torch.cuda.current_stream()
        self.runtime = Runtime()
        self.pools = Pools(torch)
        self.addresses = [0] * plan["slots"]
        self.streams = [0] + [self.runtime.stream() for _ in range(plan["streams"] - 1)]
        self.answer = {"steps": [], "checks": 0, "differences": 0, "first_difference": None, "stopped": None}
        self.answer["survived"] = self.answer["outside_failed"] = 0
        self.step = None
        self.peak = {"allocated_bytes.all": 0, "reserved_bytes.all": 0, "active_bytes.all": 0}
        # Occupy the memory that was not free when the traced run started: its context may have been larger,
        # and other processes may have used the device.
        free = plan["free_at_start"]
        filler = 0 if free is None else self.runtime.free_bytes() - free
        if filler > 0:
            self.runtime.alloc(filler)

    def stats(self):
        """Returns the allocator's statistics as nested dicts, as `torch.cuda.memory_stats_as_nested_dict`."""
        return self.torch._C._cuda_memoryStats(0)

    def end_step(self):
        """Records the peaks of the step that ends, and resets the allocator's peaks."""
        stats = self.stats()
        peaks = {name: stats[name.split(".")[0]]["all"]["peak"] for name in self.peak}
        self.peak = {name: max(old, peaks[name]) for name, old in self.peak.items()}
        if self.step is not None:
            self.answer["steps"].append([self.step, peaks["reserved_bytes.all"]])
        self.torch._C._cuda_resetPeakMemoryStats(0)

    def check(self, index, expected):
        """Compares the reserved bytes with the reserved bytes of the trace at the same operation."""
        reserved = self.stats()["reserved_bytes"]["all"]["current"]
        self.answer["checks"] += 1
        if reserved != expected:
            self.answer["differences"] += 1
            self.answer["first_difference"] = self.answer["first_difference"] or [index, expected, reserved]

    def run(self, operations, first):
        """Repeats the operations. Returns False if a request runs out of memory that
        succeeded in the trace."""
        alloc = self.torch._C._cuda_cudaCachingAllocator_raw_alloc
        free = self.torch._C._cuda_cudaCachingAllocator_raw_delete
        out_of_memory = getattr(self.torch, "OutOfMemoryError", RuntimeError)
        addresses, streams = self.addresses, self.streams
        index = first
        for kind, a, b, c in operations:
            index += 1
            if kind == ALLOC:
                try:
                    addresses[a] = alloc(b, streams[c])
                except (out_of_memory, RuntimeError) as error:
                    if "out of memory" not in str(error):
                        raise
                    self.answer["stopped"] = {"operation": index, "step": self.step, "requested_bytes": b}
                    return False
            elif kind == FREE:
                free(addresses[a])
            elif kind == RESERVED:
                self.check(index, a)
            elif kind == STEP:
                self.end_step()
                self.step = a
            elif kind == FAILED:
                try:
                    free(alloc(b, streams[c]))
                    self.answer["survived"] += 1
                except (out_of_memory, RuntimeError) as error:
                    if "out of memory" not in str(error):
                        raise
            elif kind == EMPTY_CACHE:
                self.torch._C._cuda_emptyCache()
            elif kind == POOL:
                self.pools.use(a)
            elif kind == RELEASE:
                self.pools.release(a)
            elif kind == OUTSIDE_ALLOC:
                addresses[a] = self.runtime.alloc(b)
                self.answer["outside_failed"] += not addresses[a]
            elif kind == OUTSIDE_FREE and addresses[a]:
                self.runtime.free(addresses[a])
        return True

    def whole(self, requests, peak_index):
        """Repeats all operations. Returns the answer for these settings."""

        def part(begin, end):
            numbers = iter(requests[4 * begin : 4 * end])
            return self.run(zip(numbers, numbers, numbers, numbers), begin)

        if part(0, peak_index):
            stats = self.stats()
            self.answer["at_peak"] = {
                "allocated_bytes": stats["allocated_bytes"]["all"]["current"],
                "active_bytes": stats["active_bytes"]["all"]["current"],
                "reserved_bytes": stats["reserved_bytes"]["all"]["current"],
            }
            part(peak_index, len(requests) // 4)
        self.end_step()
        stats = self.stats()
        self.answer["peak_reserved_bytes"] = self.peak["reserved_bytes.all"]
        self.answer["peak_allocated_bytes"] = self.peak["allocated_bytes.all"]
        self.answer["peak_active_bytes"] = self.peak["active_bytes.all"]
        self.answer["retries"] = stats["num_alloc_retries"]
        self.answer["segments_allocated"] = stats["segment"]["all"]["allocated"]
        self.answer["segments_freed"] = stats["segment"]["all"]["freed"]
        return self.answer


def in_child(work):
    """Runs `work` in a child process. Returns the dict that `work` returned, or a dict
    with the key `failed`."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = work()
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        with os.fdopen(write, "w") as pipe:
            json.dump(answer, pipe)
        sys.stderr.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"failed": f"its process ended with status {status}"}


def main():
    """Replays the requests with each setting of the plan."""
    requests_path, plan_path = sys.argv[1:]
    with open(plan_path) as file:
        plan = json.load(file)
    try:
        import torch
    except ImportError as error:
        print(json.dumps({"no_torch": str(error), "python": sys.executable}), flush=True)
        return
    if not torch.version.cuda:
        print(
            json.dumps(
                {"no_torch": f"torch {torch.__version__} is built without CUDA", "python": sys.executable}
            )
        )
        return
    print(json.dumps({"torch": torch.__version__, "python": sys.executable}), flush=True)
    with open(requests_path, "rb") as file:
        requests = memoryview(file.read()).cast("q")
    for conf in plan["settings"]:

        def work(conf=conf):
            for name in CONF_VARIABLES:
                os.environ[name] = conf
            return Replay(torch, plan).whole(requests, plan["peak_index"])

        print(json.dumps({"settings": conf, **in_child(work)}), flush=True)


main()
