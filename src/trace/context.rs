//! Ids of texts, contexts and stacks.
//!
//! The traced process interns each text, context and stack once, and records the definition of its id in the
//! event queue. Events then refer to each by a four-byte id.

use crate::Category;
use crate::stacks::FrameKind;

/// The id of a text; 0 means no text.
pub type TextId = u32;
/// The id of a context; 0 means the default context, which has no owner.
pub type ContextId = u32;
/// The id of a stack; 0 means no stack.
pub type StackId = u32;

/// The maximum number of contexts and of stacks per process. Without a limit, a program that gives each batch
/// its own range would fill the memory.
pub const MAX_CONTEXTS: usize = 1 << 20;
/// The maximum total size of the texts of a process, in bytes.
pub const MAX_TEXT_BYTES: usize = 64 << 20;
/// An upper bound on the number of texts, given that names are longer than 8 bytes on average.
pub const MAX_TEXTS: usize = MAX_TEXT_BYTES / 8;

/// A stack: its innermost frame, and the parent stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The stack without this frame.
    pub parent: StackId,
    /// The text of the frame.
    pub text: TextId,
    /// The kind of the frame.
    pub kind: FrameKind,
}

impl Frame {
    /// Creates the frame of an op inside `parent`.
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
    /// The stack; 0 for none.
    pub stack: StackId,
    /// The current stream; 0 is the default stream.
    pub stream: i64,
    /// Flags that affect the category; see [`Context::RECOMPUTED`] and the constants after it.
    pub flags: u8,
    /// The category of what FSDP allocates in its own scopes; elsewhere [`Category::None`], so that the phase
    /// and the flags decide.
    pub category: Category,
}

impl Context {
    /// Set inside the forward of a module that runs again during a backward.
    pub const RECOMPUTED: u8 = 1;
    /// Set inside the forward of a module.
    pub const IN_MODULE: u8 = 2;
    /// Set if the script named no phase, so that the phase is inferred from the state of the thread.
    pub const INFERRED_PHASE: u8 = 4;
    /// Set while a stream of the process is being captured into a CUDA graph.
    pub const CAPTURED: u8 = 16;
    /// Set outside the detailed steps.
    pub const WITHOUT_DETAIL: u8 = 32;
}
