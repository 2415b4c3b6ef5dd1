//! Ids of texts, contexts and stacks.
//!
//! The traced process interns each text, context and stack once and defines its number in the event queue.
//! Events then carry four bytes for each.

use crate::stacks::FrameKind;

/// The number of a text; 0 is "no text".
pub type TextId = u32;
/// The number of a context; 0 is "no context".
pub type ContextId = u32;
/// The number of a stack; 0 is "no stack".
pub type StackId = u32;

/// The most contexts and the most stacks that a process numbers. A program that gives each of its batches a
/// range of its own would otherwise fill the memory with them.
pub const MAX_CONTEXTS: usize = 1 << 20;
/// The most bytes of texts that a process numbers.
pub const MAX_TEXT_BYTES: usize = 64 << 20;
/// An upper bound for the number of texts: names are longer than 8 bytes on average.
pub const MAX_TEXTS: usize = MAX_TEXT_BYTES / 8;

/// The innermost frame of a stack, and the stack around it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The stack around the frame.
    pub parent: StackId,
    /// The text of the frame.
    pub text: TextId,
    /// The kind of the frame.
    pub kind: FrameKind,
}

impl Frame {
    /// An op inside `parent`.
    #[must_use]
    pub fn op(parent: StackId, text: TextId) -> Frame {
        Frame { parent, text, kind: FrameKind::Op }
    }
}

/// The owner of allocations: op, module and phase, with the stack and the stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Context {
    /// The innermost op.
    pub op: TextId,
    /// The module path.
    pub module: TextId,
    /// The phase.
    pub phase: TextId,
    /// The stack, 0 for none.
    pub stack: StackId,
    /// The current stream; 0 is the default one.
    pub stream: i64,
    /// Per-bit hints for the category; see [`Context::RECOMPUTED`].
    pub flags: u8,
}

impl Context {
    /// The forward of a module that runs again inside backward.
    pub const RECOMPUTED: u8 = 1;
    /// Inside the forward of a module.
    pub const IN_MODULE: u8 = 2;
    /// The script named no phase: it is inferred from the state of the thread.
    pub const INFERRED_PHASE: u8 = 4;
    /// Parameters that FSDP gathers for a forward or a backward.
    pub const GATHERED: u8 = 8;
    /// A stream of the process records a CUDA graph.
    pub const CAPTURED: u8 = 16;
    /// Outside the detailed steps.
    pub const WITHOUT_DETAIL: u8 = 32;
}
