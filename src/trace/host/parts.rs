//! The names of the parts of a process's memory on the host. The writer stores them, and the reports group and explain
//! the parts by them.

use crate::Category;

/// The prefix of the names of the parts that are CPU tensors.
pub const CPU_TENSORS: &str = "CPU tensors";
/// The part for pinned memory in use, and the prefix of [`PINNED_ROUNDING`] and [`PINNED_CACHED`].
pub const PINNED: &str = "pinned";
/// The part for the bytes by which torch's allocator rounded requests for pinned memory up.
pub const PINNED_ROUNDING: &str = "pinned: rounding";
/// The part for the pinned blocks that torch's allocator keeps for later requests.
pub const PINNED_CACHED: &str = "pinned: cached";
/// The part for managed memory: the pages of `cudaMallocManaged` that are on the host.
pub const MANAGED: &str = "CUDA managed";
/// The part for the memory of a simulated GPU.
pub const SIMULATED: &str = "simulated GPU";
/// The part for the code and data of libraries.
pub const LIBRARIES: &str = "libraries";
/// The part for the stacks of threads.
pub const STACKS: &str = "stacks";
/// The part that malloc allocates with `brk`.
pub const HEAP: &str = "heap";
/// The part for the further arenas of glibc's malloc.
pub const ARENAS: &str = "malloc arenas";
/// The part for all remaining memory without a file.
pub const ANONYMOUS: &str = "anonymous";
/// The part for the mappings of NVIDIA's devices.
pub const DRIVER: &str = "CUDA driver";
/// The part for the tracer's own memory.
pub const OWN: &str = "memtrace";
/// The prefix of a part's name before the path of a file.
pub const FILE: &str = "file ";
/// The prefix of a part's name before the name of shared memory.
pub const SHARED: &str = "shared ";
/// The part for all files and shared memories that are not listed by name.
pub const OTHER_FILES: &str = "file (others)";

/// Returns the name of the part for CPU tensors of a category.
#[must_use]
pub const fn of_tensors(category: Category) -> &'static str {
    match category {
        Category::Parameter => "CPU tensors parameter",
        Category::Buffer => "CPU tensors buffer",
        Category::Gradient => "CPU tensors gradient",
        Category::Activation => "CPU tensors activation",
        Category::OptimizerState => "CPU tensors optimizer_state",
        Category::Input => "CPU tensors input",
        _ => CPU_TENSORS,
    }
}
