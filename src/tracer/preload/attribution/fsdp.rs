//! The parameters that FSDP2 gathers before a module's forward and before its backward, and frees afterwards.
//! In every phase, their memory counts as parameters of the module for which FSDP gathers them.

use memtrace_record::intern::{TextId, with_tables};
use rustc_hash::FxHashMap;

use crate::attribution::context;
use crate::runtime::fork::ForkSafe;

/// The prefix of the user scope in which FSDP gathers parameters for a forward
/// (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, 2.6 to 2.15). A scope ends with the name of the
/// module in its root: `FSDP::pre_forward (layers.0)`. `OTHERS` are the prefixes of the scopes that gather
/// outside a forward.
const FORWARD: &str = "pre_forward";
const OTHERS: [&str; 4] = ["pre_backward", "all_gather", "forward_prefetch for ", "backward_prefetch for "];

/// Module paths, by the module's name within its root. Filled by the scopes of forwards. A name has several
/// paths if several models use it.
static PATHS: ForkSafe<Option<FxHashMap<String, Vec<TextId>>>> = ForkSafe::new(None);

/// Returns the module whose parameters this scope gathers: 0 if it is unknown, `None` if the scope gathers
/// nothing. `near` is a module of the model whose backward runs, or 0; it decides between models that use the
/// same name.
pub(crate) fn gathered_module(scope: TextId, near: TextId) -> Option<TextId> {
    let scope = with_tables(|tables| tables.text_of(scope).strip_prefix("FSDP::").map(str::to_owned))?;
    let is_forward = scope.starts_with(FORWARD);
    if !is_forward && !OTHERS.iter().any(|other| scope.starts_with(other)) {
        return None;
    }
    // The root module has an empty name, so its scope ends after the prefix.
    let name = match scope.split_once(" (").or(scope.split_once(" for ")) {
        Some((_, name)) => name.trim_end_matches(')'),
        None => "",
    };
    let module = if is_forward { context::module() } else { 0 };
    Some(PATHS.with(|paths| {
        let paths = paths.get_or_insert_default();
        if module == 0 {
            return paths.get(name).map_or(0, |paths| only_path(paths, near));
        }
        let known = paths.entry(name.to_owned()).or_default();
        if !known.contains(&module) {
            known.push(module);
        }
        module
    }))
}

/// Returns the only path, or else the only path that has the same root as `near`; 0 if there is no such path.
fn only_path(paths: &[TextId], near: TextId) -> TextId {
    if let [path] = paths {
        return *path;
    }
    with_tables(|tables| {
        let root = |path: &TextId| tables.text_of(*path).split('.').next();
        let mut found = paths.iter().filter(|path| root(path) == root(&near));
        found.next().copied().filter(|_| found.next().is_none()).unwrap_or(0)
    })
}
