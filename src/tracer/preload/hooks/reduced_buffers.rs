//! Buffers of gradients that ranks reduce in a backward, such as the buckets that DDP's C++ reducer
//! allocates. No tensor of the program names them. A buffer that the backward itself allocated stays
//! `temporary`, because it is part of the gradient's computation, as in tensor parallelism.

use std::ffi::c_void;

use memtrace_record::intern::{TextId, with_tables};
use memtrace_record::recorder::text_id;
use memtrace_trace::text::{NONE, SCRIPT};
use memtrace_trace::{Category, Claim};

use crate::attribution::{detail, op_stack};
use crate::python::tags::{self, Tag};
use crate::runtime::{fixed_text::FixedText, session, thread};

/// Returns the outermost module that contains `path`, or 0 if `path` is outside all modules.
fn root_of(path: TextId) -> TextId {
    let root = with_tables(|tables| {
        let path = tables.text_of(path);
        match path.split_once('.') {
            Some((root, _)) => root.to_owned(),
            None => path.to_owned(),
        }
    });
    if root.is_empty() || root == NONE || root == SCRIPT { 0 } else { text_id(&root) }
}

/// Tags the block of a buffer that is about to be reduced as a gradient, if this is one of autograd's
/// threads.
pub(super) fn is_reduced(buffer: *const c_void) {
    static NAME: FixedText = FixedText::new("bucket");
    let pointer = buffer as usize;
    let has_tags = session::session().is_some_and(|session| session.settings.modules);
    if pointer == 0 || !has_tags || !thread::is_autograd() {
        return;
    }
    // Outside the detailed steps, the module is unknown, because the last recorded backward function belongs
    // to an earlier step.
    let path = if detail::is_on() { root_of(op_stack::backward_module()) } else { 0 };
    let claim = Claim::Reduced;
    tags::record(Tag { pointer, category: Category::Gradient, path, name: NAME.id(), form: 0, claim });
}
