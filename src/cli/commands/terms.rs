//! The words that the reports use, for `memtrace help`. A test checks that the column heads of all tables are
//! among these words.

/// A word and its meaning.
pub(super) struct Term {
    /// The word and its synonyms, in lower case.
    pub(super) names: &'static [&'static str],
    /// The meaning. The list of words shows only the first sentence.
    pub(super) meaning: &'static str,
}

const fn term(names: &'static [&'static str], meaning: &'static str) -> Term {
    Term { names, meaning }
}

/// All words of `memtrace help`, in groups: totals, memory and its owners, moments, and the rest.
pub(super) const TERMS: &[Term] = &[
    term(
        &["allocated", "allocated memory", "allocated bytes"],
        "Memory of blocks that the program uses: tensors, and memory that libraries take through torch's \
         allocator. It is what torch.cuda.memory_allocated() returns, rounded to 512 bytes a block. As a \
         time: when the block was allocated.",
    ),
    term(
        &["active", "active memory"],
        "Allocated memory, and freed blocks that a stream still uses (record_stream). Torch can use \
         them again only when the stream is done.",
    ),
    term(
        &["reserved", "reserved memory", "cached"],
        "Memory that torch's allocator holds from CUDA in segments, in use or not: \
         torch.cuda.memory_reserved(). The part that is not allocated is its cache.",
    ),
    term(
        &["device used", "used", "in use"],
        "All memory in use on the device: segments, the CUDA context, libraries outside torch's \
         allocator, and other processes. It is total minus free of cudaMemGetInfo, and what \
         nvidia-smi shows.",
    ),
    term(
        &["torch and libraries"],
        "Segments of torch and the memory that traced libraries took from CUDA. Reports show it instead of \
         device used if the trace has no sample of the device.",
    ),
    term(
        &["sampled"],
        "A figure from the driver or NVML, read once a second by default (MEMTRACE_SAMPLE_MS). Between \
         samples, the traced calls update it.",
    ),
    term(&["requested"], "The bytes that the program asked for, before the allocator rounds them."),
    term(&["rounded"], "The requested bytes, rounded up by the allocator to a multiple of 512."),
    term(
        &["block", "blocks"],
        "A piece of a segment that torch's allocator hands out: one tensor's storage, or a library's \
         workspace.",
    ),
    term(
        &["segment", "segments"],
        "Memory that torch's allocator took from CUDA with one cudaMalloc, and splits into blocks. It \
         goes back only when all of its blocks are free.",
    ),
    term(
        &["expandable segment", "expandable segments"],
        "A segment that grows in place, by PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. It \
         avoids most fragmentation.",
    ),
    term(
        &["pool", "private pool"],
        "Segments that only one user of the allocator gets: a CUDA graph or a MemPool. Pool 0 is the \
         default.",
    ),
    term(
        &["stream"],
        "A queue of work of the device. A free block is reused only by the stream that it was allocated on.",
    ),
    term(
        &["fragmentation", "hole", "holes"],
        "Free memory inside segments that no request fits into. `memtrace frag` shows it.",
    ),
    term(
        &["pinned by", "pinned"],
        "The blocks that keep a segment from going back to CUDA: as long as one of them lives, the \
         whole segment stays.",
    ),
    term(
        &["fit", "largest fit"],
        "The largest request that a segment's free memory can serve without a new segment.",
    ),
    term(
        &["largest value", "smallest value", "largest batch", "does not fit", "fewest gpus", "too few"],
        "The limits that `memtrace fit` found: the last value or number of GPUs with which the program fits, and the \
         first with which it does not.",
    ),
    term(
        &["peak", "peak allocated", "highest"],
        "The highest total in the chosen part of the trace, and the moment when it was reached. If no \
         metric is named, it is the peak of allocated memory.",
    ),
    term(
        &["host peak"],
        "The highest resident memory of the process and its child processes on the host. Pages that processes \
         share count for each.",
    ),
    term(
        &["at", "at the peak with value", "at the peak on gpus", "at step", "at the peak"],
        "The moment of the figure: the time since the start, or the training step.",
    ),
    term(
        &["oom", "ooms", "out of memory"],
        "A request that the allocator could not serve: torch.cuda.OutOfMemoryError. `memtrace oom` shows \
         who held the memory.",
    ),
    term(
        &["retry", "retries"],
        "A failed request for memory, after which the allocator returned all its free segments to CUDA and \
         asked again. Retries cost time; if the second attempt fails too, it is an OOM.",
    ),
    term(
        &["module", "modules"],
        "The path of the nn.Module whose forward or backward allocated the block: GPT.h.0.mlp. \
         (script) is code outside all modules, (no module) is memory without an op.",
    ),
    term(
        &["op", "ops", "op call"],
        "The innermost operator of torch that allocated the block: aten::mm. In `memtrace ops` it is the \
         outermost: the one that the program or autograd called. (no op) is memory that no operator \
         allocated.",
    ),
    term(
        &["phase", "phases"],
        "The part of a step: forward, backward, optimizer, or a range that the program names.",
    ),
    term(
        &["step", "steps"],
        "A training step. It ends with the optimizer's step, or at a mark of the program; rows after the \
         last step belong to it. In a server, a step is one forward of the root module.",
    ),
    term(
        &["mark", "marks"],
        "A named moment of the program: torch.cuda.nvtx.mark or memtrace.mark, or the end of a range of the \
         program. `--at mark:NAME` shows the memory then.",
    ),
    term(
        &["range", "ranges"],
        "A named span of the program, opened by NVTX (torch.cuda.nvtx.range_push) or memtrace.range.",
    ),
    term(
        &["category"],
        "The use of a block. torch.profiler has these names, too: parameter, gradient, activation, \
         optimizer_state, input, temporary, autograd_detail. memtrace adds buffer, kv_cache, cuda_graph, \
         workspace, script, loaded, other, and for FSDP unsharded_param, unsharded_grad, all_gather, \
         reduce_scatter.",
    ),
    term(&["parameter", "parameters"], "The weights of a module."),
    term(
        &["buffer", "buffers"],
        "Tensors of a module that are not parameters: registered buffers, such as the statistics of a batch \
         norm, and tensors that it keeps as attributes.",
    ),
    term(&["gradient", "gradients"], "The .grad of a parameter, from the moment of its allocation."),
    term(
        &["activation", "activations"],
        "A tensor that a forward allocated. In training it mostly lives until the backward that needs it.",
    ),
    term(
        &["optimizer_state", "optimizer state"],
        "The state of an optimizer: two tensors a parameter with Adam.",
    ),
    term(
        &["temporary"],
        "A tensor that a backward or an optimizer's step made for itself. One that outlives the \
         optimizer's step becomes optimizer_state.",
    ),
    term(
        &["kv_cache", "kv cache"],
        "Keys and values of earlier tokens: a cache of Transformers, or the blocks of a server such as \
         vLLM.",
    ),
    term(
        &["cuda_graph", "cuda graph"],
        "Blocks that were allocated while a CUDA graph was captured. They stay in the graph's private \
         pool, because each replay uses the same addresses.",
    ),
    term(
        &["unsharded_param"],
        "A whole parameter that FSDP or DeepSpeed gathers for a forward or a backward. `parameter` is the part of the rank.",
    ),
    term(
        &["unsharded_grad"],
        "The gradient of a whole parameter, before FSDP reduces it. `gradient` is the part of the rank.",
    ),
    term(&["all_gather"], "The buffer into which FSDP or DeepSpeed gathers the parts of all ranks."),
    term(&["reduce_scatter"], "The buffer from which FSDP or DeepSpeed sums the gradients of all ranks."),
    term(&["autograd_detail"], "Memory that autograd itself keeps during a backward."),
    term(
        &["input", "inputs"],
        "Memory that the step or the call gets: the batch, or the tensors given to a module.",
    ),
    term(&["output", "outputs"], "The memory of the tensors that a module's call returns."),
    term(&["preexisting"], "Memory that was already allocated when the trace or the step began."),
    term(&["created"], "Memory that was allocated in this part of the trace."),
    term(&["destroyed"], "Memory that was freed in this part of the trace."),
    term(&["changed in place"], "Memory that an operator wrote to without allocating."),
    term(&["before"], "The total just before the call; in a comparison, the first run."),
    term(&["after"], "The total just after the call; in a comparison, the second run."),
    term(&["added"], "The memory that a call or a step left behind: after minus before."),
    term(
        &["change"],
        "The difference from the first run to the second; in `memtrace advise`, the change to make.",
    ),
    term(&["peak forward"], "The highest total during the forward of the module, over all its calls."),
    term(&["peak backward"], "The highest total during the backward of the module, over all its calls."),
    term(
        &["retained"],
        "Memory that a module's forward allocated and that is still held at its end: mostly \
         activations for the backward.",
    ),
    term(&["own"], "The blocks of the module itself, without the modules below it."),
    term(&["total"], "The blocks of the module and of all modules below it."),
    term(&["largest"], "The size of the largest of the repeated layers that one row joins."),
    term(
        &["types"],
        "The types of the parameters of a module and of the modules below it, by their share of the bytes.",
    ),
    term(&["own parameters"], "The parameters of the module itself, without the modules below it."),
    term(
        &["type"],
        "The class of the module, such as Linear. It is unknown for a module that was never \
                     called.",
    ),
    term(&["recomputed"], "Forwards that a checkpoint ran again during the backward."),
    term(&["calls"], "The number of calls of a module, an operator or a function of CUDA."),
    term(&["largest call"], "The bytes that the largest single call allocated."),
    term(
        &["took"],
        "The duration of the call; in `memtrace fit`, the duration of a run, or of all runs of \
                     a row.",
    ),
    term(&["tokens"], "The length of a sequence in a row of `memtrace fit --recipe`."),
    term(&["pixels"], "The width and height of an image in a row of `memtrace fit --recipe`."),
    term(
        &["kv cache tokens"],
        "The number of tokens of all requests together for which a server has a cache.",
    ),
    term(
        &["peak host"],
        "The highest memory of a program on the host, of all its processes. With `--ranks`, of all ranks of a node.",
    ),
    term(
        &["largest part"],
        "The category with the most memory at the peak, and its share of allocated memory.",
    ),
    term(&["runs"], "How often `memtrace fit` ran the program for a row."),
    term(
        &["held", "held by"],
        "The owner of memory at the shown moment: module, op, category, library or cause.",
    ),
    term(
        &["sure"],
        "How far to trust a prediction of `memtrace advise`: high, medium or low. The report says why.",
    ),
    term(
        &["costs"],
        "The cost of a change in `memtrace advise`: ops that run again, lower precision, transfers to the \
         host.",
    ),
    term(
        &["saved"],
        "The part of the peak that a change of `memtrace advise` saves. The peak may then be at another moment.",
    ),
    term(
        &["owner"],
        "The module, op and phase that allocated a block. Memory without any owner was allocated outside \
         all modules, ops and phases.",
    ),
    term(
        &["share", "of device", "of limit"],
        "A part of the whole, in percent: of the peak, of the device's memory, or of the limit.",
    ),
    term(&["bytes", "memory"], "A size, in the unit of --units; 1 KiB is 1024 bytes."),
    term(&["count", "events"], "The number of rows, blocks or calls that the line is about."),
    term(&["up to"], "The upper bound of a range of sizes or durations."),
    term(&["max"], "The largest value; it is exact."),
    term(
        &["p50", "p90", "p99", "quantile"],
        "The value that 50, 90 or 99 % of all values do not exceed. It is exact up to 65,536 different \
         values; beyond that `quantile_error` in --json gives the error.",
    ),
    term(&["per step"], "The growth per step. A leak grows by the same amount in each step."),
    term(
        &["leak", "leaks"],
        "Memory that is allocated in each step and never freed. `memtrace leaks` lists it by owner.",
    ),
    term(&["rank", "ranks"], "The number of a process in a distributed job, from 0."),
    term(&["pid", "process"], "The id of the process."),
    term(&["skew"], "The difference between the highest and the lowest rank."),
    term(
        &["device", "ordinal"],
        "The number of a GPU as the process sees it; -1 is pinned host memory, -2 (`cpu`) CPU tensors.",
    ),
    term(&["free", "device free"], "Device memory that is not in use, as cudaMemGetInfo returns it."),
    term(&["growth"], "How much the memory on this line grew from the second step to the end."),
    term(&["now"], "The memory on this line at the end of the trace, or of the chosen steps."),
    term(&["gpu"], "The number of the GPU, as CUDA counts it."),
    term(&["libraries"], "Memory that libraries took from CUDA, outside torch's allocator."),
    term(&["first memory"], "The Python line or the op that made a process's first allocation on a GPU."),
    term(&["free at start"], "Free memory when the program begins: the total less the CUDA context."),
    term(
        &["context", "cuda context"],
        "Memory that the driver takes for a process before its first tensor: code of kernels, stacks and \
         queues. It is not part of reserved memory.",
    ),
    term(
        &["workspace", "workspaces"],
        "Scratch memory of a library or a server, such as cuBLAS, cuDNN or FlashInfer. The workspace of \
         cuBLAS belongs to no tensor.",
    ),
    term(
        &["script"],
        "Memory that the script or a library allocated outside every module, forward, backward and \
         optimizer's step, and for which no other use was found.",
    ),
    term(
        &["loaded"],
        "Memory that reached the GPU without an op, in the phase load: a checkpoint that was read, a \
         storage that was copied. If a parameter or an optimizer's state takes this memory over, its \
         category changes to theirs.",
    ),
    term(
        &["other"],
        "The row of PyTorch's MemTracker for memory that the program registered. memtrace never records \
         this category: a registered tensor is a parameter or a buffer.",
    ),
    term(
        &["sample"],
        "A row with figures from the driver or NVML; see sampled. On device -1, with the kernel's figures \
         of host memory.",
    ),
    term(&["figure"], "A text from the output of a program: the group that `memtrace fit --ask` matches."),
    term(&["advice"], "A change that lowers the figure on the same line."),
    term(&["limit", "budget"], "The maximum memory that a file for `memtrace budget` allows."),
    term(
        &["lost", "lost events", "events lost"],
        "Events that the recorder dropped because its buffer was full. Totals are wrong only until torch's \
         allocator reports its totals again. To avoid the loss, set a larger MEMTRACE_BUFFER.",
    ),
    term(
        &["simulated gpu", "phantom"],
        "A card that memtrace simulates (run --phantom): torch's allocator is real, kernels do not \
         run.",
    ),
    term(
        &["card"],
        "The model of a GPU, such as h100-80g; `memtrace run --phantom list` lists those that can be \
         simulated.",
    ),
    term(&["gpus"], "A number of GPUs that `memtrace fit` tried."),
    term(&["capability"], "The compute capability of a card: 9.0 for H100."),
    term(&["trace"], "The CSV of one process, or the folder with the CSVs of a run."),
    term(&["part"], "One file of a rotated trace (MEMTRACE_ROTATE)."),
    term(
        &["stack", "line"],
        "The ops, the module and, with MEMTRACE_STACKS=python, the lines of Python that led to an \
         allocation.",
    ),
    term(&["size"], "A class of request sizes."),
    term(&["event"], "A row of the trace; `memtrace help events` lists the kinds."),
    term(&["column"], "A column of the trace; `memtrace help columns` lists them."),
    term(&["variable"], "A setting of the environment; `memtrace help variables` lists them."),
    term(&["default"], "The value that is used when none is given."),
    term(&["name"], "The name of what the line is about: a range, a variable or a card."),
    term(&["on"], "The device or the process that the line is about."),
    term(&["value"], "The value that a run of `memtrace fit` was given."),
    term(
        &["communicator"],
        "A group of ranks of NCCL. Each takes buffers on the device, outside torch's allocator.",
    ),
    term(
        &["stand-in"],
        "A rank that does not run in a simulated cluster (`memtrace run --ranks`). It answers each rank \
         with a copy of that rank's own data.",
    ),
    term(
        &["without detail", "detail", "detailed step"],
        "Shown instead of the op or module of memory that was allocated outside the steps that \
         MEMTRACE_DETAIL records in full. `memtrace peak --step N` of a detailed step shows what such memory \
         is likely to be.",
    ),
    term(&["collective"], "A call in which all ranks of a group take part, such as all_reduce."),
    term(
        &["overflow list"],
        "Events that did not fit into the shared buffer and wait in the process's memory.",
    ),
];
