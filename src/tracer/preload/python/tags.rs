//! Tags: rows that record the category of a block, some time after its allocation.

use memtrace_record::Recorder;
use memtrace_record::intern::TextId;
use memtrace_trace::{Api, Category, Claim, Header, Payload};

/// The content of a tag row.
pub(crate) struct Tag {
    /// The address of the block.
    pub(crate) pointer: usize,
    /// The use of the block, as a category.
    pub(crate) category: Category,
    /// The path of the module; 0 if unknown.
    pub(crate) path: TextId,
    /// The name within the module; 0 if unknown.
    pub(crate) name: TextId,
    /// The type and shape of the tensor; 0 if unknown.
    pub(crate) form: TextId,
    /// The strength of the tag, which decides whether it replaces an earlier use of the block.
    pub(crate) claim: Claim,
}

/// Records a tag for the live block at `tag.pointer`. Has no effect without a trace.
pub(crate) fn record(tag: Tag) {
    // Without a trace, no block has been recorded that could get a tag.
    let Some(recorder) = Recorder::active() else { return };
    // The header has no context and no step, because the tag belongs to the context and the step of the
    // block's allocation.
    let payload = Payload::Tag {
        address: tag.pointer as u64,
        category: tag.category,
        module: tag.path,
        name: tag.name,
        form: tag.form,
        claim: tag.claim,
    };
    recorder.record(|clock_ns| payload.pack(Header::new(clock_ns, Api::Python, 0)));
}
