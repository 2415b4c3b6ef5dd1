//! The names of the parts of a process's memory that consist of rows of the trace.

use crate::Category;

/// The prefix of the names of the parts that are CPU tensors.
pub const CPU_TENSORS: &str = "CPU tensors";
/// The name of the part for pinned memory in use, and the prefix of those for the bytes by which torch's
/// allocator rounds requests up and for the blocks that it keeps for later requests.
pub const PINNED: &str = "pinned";

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
