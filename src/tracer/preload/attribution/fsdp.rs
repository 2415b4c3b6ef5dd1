//! The memory of FSDP: the parameters that it gathers before a forward and before a backward, and the buffers in
//! which it gathers them and reduces gradients. FSDP names its scopes (`record_function`), and the innermost
//! scope of an allocation gives its category and its module in every phase.

use memtrace_record::intern::{TextId, with_tables};
use memtrace_trace::Category;
use rustc_hash::FxHashMap;

use crate::attribution::context;
use crate::runtime::fork::ForkSafe;
use crate::runtime::thread::running_ops::FsdpScope;

/// The prefix of the scope in which FSDP2 gathers parameters for a forward.
const FORWARD: &str = "pre_forward";

/// The prefixes of FSDP2's scopes (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, 2.6 to 2.15) and
/// the category of what it allocates there. The first match counts. A scope ends with the name of the module
/// in its root: `FSDP::pre_forward (layers.0)`. On a single rank, FSDP2 copies the parameters without
/// `all_gather` and `all_gather_copy_out`.
const FSDP2: [(&str, Category); 7] = [
    (FORWARD, Category::UnshardedParameter),
    ("pre_backward", Category::UnshardedParameter),
    ("all_gather_copy_out", Category::UnshardedParameter),
    ("all_gather", Category::AllGather),
    ("forward_prefetch for ", Category::AllGather),
    ("backward_prefetch for ", Category::AllGather),
    ("post_backward_reduce", Category::ReduceScatter),
];

/// The scopes of FSDP1 (torch/distributed/fsdp/_runtime_utils.py, 2.6 to 2.15). FSDP1 gathers into the
/// unsharded parameter itself. The scopes do not name their module: in a forward, it is the module that runs; in a
/// backward, the tracer sets it (see `tracer/fsdp1.py`).
const FSDP1: [(&str, Category, Sharded); 7] = [
    ("_pre_forward", Category::UnshardedParameter, Sharded::Running),
    ("_root_pre_forward", Category::UnshardedParameter, Sharded::Running),
    ("_pre_forward_prefetch", Category::UnshardedParameter, Sharded::Running),
    ("_pre_backward_hook", Category::UnshardedParameter, Sharded::Current),
    ("_pre_backward_prefetch", Category::UnshardedParameter, Sharded::Next),
    ("_post_backward_prefetch", Category::UnshardedParameter, Sharded::Next),
    ("_post_backward_hook", Category::ReduceScatter, Sharded::Current),
];

/// The module to which a scope of FSDP1 belongs.
#[derive(Clone, Copy)]
enum Sharded {
    /// The module whose forward runs.
    Running,
    /// The module whose backward begins or ends.
    Current,
    /// The module whose parameters are gathered ahead.
    Next,
}

/// Module paths, by the module's name within its root. Filled by the scopes of forwards. A name has several
/// paths if several models use it.
static PATHS: ForkSafe<Option<FxHashMap<String, Vec<TextId>>>> = ForkSafe::new(None);

/// Returns what a scope means for the memory that is allocated inside it, or `None` if it is not a scope of
/// FSDP. `near` is a module of the model whose backward runs, or 0; it decides between models that use the same
/// name. `current` and `next` are the modules of FSDP1's scopes in a backward, or 0.
pub(crate) fn scope(name: TextId, near: TextId, [current, next]: [TextId; 2]) -> Option<FsdpScope> {
    enum Found {
        Fsdp1(Category, Sharded),
        Fsdp2(Category, String),
    }
    let found = with_tables(|tables| {
        let name = tables.text_of(name);
        if let Some(name) = name.strip_prefix("FullyShardedDataParallel.") {
            let known = FSDP1.iter().find(|(known, ..)| name == *known);
            return known.map(|(_, category, sharded)| Found::Fsdp1(*category, *sharded));
        }
        let name = name.strip_prefix("FSDP::")?;
        let (_, category) = FSDP2.iter().find(|(prefix, _)| name.starts_with(prefix))?;
        Some(Found::Fsdp2(*category, name.to_owned()))
    })?;
    Some(match found {
        Found::Fsdp1(category, sharded) => {
            let module = match sharded {
                Sharded::Running => 0,
                Sharded::Current => current,
                Sharded::Next => next,
            };
            FsdpScope { category, module, is_outside_ops: category == Category::UnshardedParameter }
        }
        Found::Fsdp2(category, name) => {
            FsdpScope { category, module: module_of(&name, near), is_outside_ops: false }
        }
    })
}

/// Returns the module of a scope of FSDP2; 0 if it is unknown.
fn module_of(scope: &str, near: TextId) -> TextId {
    // The root module has an empty name, so its scope ends after the prefix.
    let name = match scope.split_once(" (").or(scope.split_once(" for ")) {
        Some((_, name)) => name.trim_end_matches(')'),
        None => "",
    };
    let module = if scope.starts_with(FORWARD) { context::module() } else { 0 };
    PATHS.with(|paths| {
        let paths = paths.get_or_insert_default();
        if module == 0 {
            return paths.get(name).map_or(0, |paths| only_path(paths, near));
        }
        let known = paths.entry(name.to_owned()).or_default();
        if !known.contains(&module) {
            known.push(module);
        }
        module
    })
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
