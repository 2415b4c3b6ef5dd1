//! The names of a run, to find limits that match nothing.

use std::collections::BTreeSet;
use std::path::Path;

use super::limits::{Limit, LimitSubject};
use crate::selection::{nearest_names, no_match};

/// All names in the traces, regardless of the window. They are used to find limits that match nothing.
#[derive(Default)]
pub(super) struct Names {
    pub(super) modules: BTreeSet<String>,
    pub(super) categories: BTreeSet<String>,
    pub(super) phases: BTreeSet<String>,
}

impl Names {
    fn for_subject(&self, subject: LimitSubject) -> Option<&BTreeSet<String>> {
        match subject {
            LimitSubject::Total(_) | LimitSubject::Host => None,
            LimitSubject::Module => Some(&self.modules),
            LimitSubject::Category => Some(&self.categories),
            LimitSubject::Phase => Some(&self.phases),
        }
    }

    /// Returns one error line for each limit that matches no name and is not optional. `path` is the run.
    pub(super) fn faults(&self, limits: &[Limit], path: &Path) -> Vec<String> {
        let mut faults = Vec::new();
        for limit in limits.iter().filter(|limit| !limit.optional) {
            let Some(names) = self.for_subject(limit.subject) else { continue };
            if !names.iter().any(|name| limit.takes(name)) {
                let section = limit.subject.section();
                let list = nearest_names(names.iter().map(String::as_str), &limit.name);
                faults.push(no_match(&format!("[{section}] {:?}", limit.name), path, section, &list));
            }
        }
        faults
    }
}
