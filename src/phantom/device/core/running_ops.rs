//! The ops of PyTorch that run on a thread, and the blocks that their kernels cannot write.
//!
//! The kernels of an op write its new memory and the arguments that its schema marks as written. So a block
//! that existed before the innermost op began, and that is not such an argument, keeps its values, whatever
//! addresses the kernels get. Nothing is assumed during an op that is not trusted, or outside of ops.

use std::cell::{Cell, RefCell};

/// An op that is running on this thread.
pub(crate) struct RunningOp {
    /// The address of the op's record.
    pub(crate) record: usize,
    /// The number of blocks that were handed out before the op began, or `None` if the op may write anything.
    pub(crate) blocks: Option<u64>,
    /// True if the program acts on a value that this op reads: it branches, or takes the value as a size.
    pub(crate) acts: bool,
    /// The addresses of the arguments that the op writes.
    pub(crate) written: Vec<usize>,
}

thread_local! {
    static RUNNING: RefCell<Vec<RunningOp>> = const { RefCell::new(Vec::new()) };
    /// The number of elements that the running op finds, if it is known or assumed before its kernels run.
    static COUNT: Cell<Option<Count>> = const { Cell::new(None) };
}

/// The result of a count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) number: u64,
    /// True if the number follows from known values. Otherwise it is assumed.
    pub(crate) is_computed: bool,
}

/// Sets the result that counting kernels on the calling thread report from now on. An op sets it before its
/// kernels run, and resets it to `None` at its end.
pub(crate) fn set_count(count: Option<Count>) {
    let _ = COUNT.try_with(|cell| cell.set(count));
}

/// Returns the result that the running op set with [`set_count`].
pub(crate) fn count() -> Option<Count> {
    COUNT.try_with(Cell::get).ok().flatten()
}

/// Adds an op that starts on this thread.
pub(crate) fn push(op: RunningOp) {
    let _ = RUNNING.try_with(|running| running.borrow_mut().push(op));
}

/// Removes an op that ends on this thread, and any ops that started after it and whose ends were not
/// reported.
pub(crate) fn pop(record: usize) {
    let _ = RUNNING.try_with(|running| {
        let mut running = running.borrow_mut();
        if let Some(place) = running.iter().rposition(|op| op.record == record) {
            running.truncate(place);
        }
    });
}

/// Returns true if the program acts on the values that a running op of this thread reads.
pub(crate) fn acts() -> bool {
    RUNNING.try_with(|running| running.borrow().iter().any(|op| op.acts)).unwrap_or(false)
}

/// Returns true if the innermost running op is trusted.
pub(crate) fn is_trusted() -> bool {
    let is =
        |running: &RefCell<Vec<RunningOp>>| running.borrow().last().is_some_and(|op| op.blocks.is_some());
    RUNNING.try_with(is).unwrap_or(false)
}

/// Returns true if the kernels of the running op cannot write a block with this start, end and number.
pub(crate) fn protects(start: usize, end: usize, number: u64) -> bool {
    let protects = |running: &RefCell<Vec<RunningOp>>| {
        running.borrow().last().is_some_and(|op| {
            op.blocks.is_some_and(|blocks| number < blocks)
                && !op.written.iter().any(|address| (start..end).contains(address))
        })
    };
    RUNNING.try_with(protects).unwrap_or(false)
}
