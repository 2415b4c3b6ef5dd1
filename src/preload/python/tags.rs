//! Tags: rows that say what a block is for, some time after it was allocated.

use memtrace_record::Recorder;
use memtrace_trace::{Api, Event, Kind};

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
    recorder.record(|clock_ns| Event {
        clock_ns,
        kind: Kind::Tag as u8,
        api: Api::Python as u8,
        addr: tag.pointer as u64,
        size: tag.category as i64,
        reserved: tag.name as u64,
        extra: tag.path as i64,
        ..Event::default()
    });
}
