//! Tags: rows that say what a block is for, some time after it was allocated.

use memtrace_record::Recorder;
use memtrace_record::intern::TextId;
use memtrace_trace::{Api, Category, Header, Payload};

/// A tag, as the tracer gives it.
pub(crate) struct Tag {
    /// The address of the block.
    pub(crate) pointer: usize,
    /// The id of a category.
    pub(crate) category: usize,
    /// The id of the module's path; 0 for none.
    pub(crate) path: usize,
    /// The id of the name within the module; 0 for none.
    pub(crate) name: usize,
}

/// Records a tag.
pub(crate) fn record(tag: &Tag) {
    // Without a trace there is no block to tag.
    let Some(recorder) = Recorder::active() else { return };
    // The context and the step are those of the block's allocation.
    let payload = Payload::Tag {
        address: tag.pointer as u64,
        category: Category::from_id(tag.category as u64).unwrap_or_default(),
        module: tag.path as TextId,
        name: tag.name as TextId,
    };
    recorder.record(|clock_ns| payload.pack(Header::new(clock_ns, Api::Python, 0)));
}
