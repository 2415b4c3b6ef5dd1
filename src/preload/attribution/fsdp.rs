//! FSDP2's parameters: gathered whole before a module's forward and before its backward, and given back behind it.
//! Their memory is parameters, of the module that FSDP gathers them for, whatever the phase is.

use memtrace_record::fork_lock::ForkLock;
use memtrace_record::intern::{TextId, with_tables};
use rustc_hash::FxHashMap;

use crate::attribution::context;

/// The scopes of torch in which they are gathered (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, 2.6 to
/// 2.15), each followed by the name that the module has in its root: `FSDP::pre_backward (layers.0)`.
const FORWARD: &str = "pre_forward";
const OTHERS: [&str; 4] = ["pre_backward", "all_gather", "forward_prefetch for ", "backward_prefetch for "];

/// The paths of modules by their names in their root, as their forwards tell: more than one where models share a
/// name.
static PATHS: ForkLock<Option<FxHashMap<String, Vec<TextId>>>> = ForkLock::new(None);

/// Whose parameters the scope of this name gathers, which begins: 0 when that is not known, `None` when the scope
/// gathers nothing. `near` is a module of the model whose backward runs.
pub(crate) fn gathered_in(scope: TextId, near: TextId) -> Option<TextId> {
    let scope = with_tables(|tables| tables.text_of(scope).strip_prefix("FSDP::").map(str::to_owned))?;
    let is_forward = scope.starts_with(FORWARD);
    if !is_forward && !OTHERS.iter().any(|other| scope.starts_with(other)) {
        return None;
    }
    // The root's has none.
    let name = match scope.split_once(" (").or(scope.split_once(" for ")) {
        Some((_, name)) => name.trim_end_matches(')'),
        None => "",
    };
    let here = if is_forward { context::module() } else { 0 };
    Some(PATHS.with(|paths| {
        let paths = paths.get_or_insert_default();
        if here == 0 {
            return paths.get(name).map_or(0, |paths| one_of(paths, near));
        }
        let known = paths.entry(name.to_owned()).or_default();
        if !known.contains(&here) {
            known.push(here);
        }
        here
    }))
}

/// The only path, or the one that has the root of `near`; 0 for none.
fn one_of(paths: &[TextId], near: TextId) -> TextId {
    if let [path] = paths {
        return *path;
    }
    with_tables(|tables| {
        let root = |path: &TextId| tables.text_of(*path).split('.').next();
        let mut found = paths.iter().filter(|path| root(path) == root(&near));
        found.next().copied().filter(|_| found.next().is_none()).unwrap_or(0)
    })
}

/// Before a fork: no lock may be held by a thread that the child does not have.
pub(crate) fn lock_for_fork() {
    PATHS.lock_for_fork();
}

/// After a fork, on both sides.
pub(crate) fn unlock_after_fork() {
    PATHS.unlock_after_fork();
}
