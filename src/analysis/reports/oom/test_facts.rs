//! Facts and holders for tests.

use serde_json::json;

use super::cause::Facts;
use crate::state::retained::{Holder, RetainedSearches};

pub(super) const GIB: i64 = 1 << 30;

/// Returns the facts of a full card: 23 of 24 GiB are reserved, and 1 GiB is requested.
pub(super) fn full() -> Facts {
    Facts {
        capacity: 24 * GIB,
        request: GIB,
        segment: GIB,
        allocated: 22 * GIB,
        reserved: 23 * GIB,
        unknown: GIB / 2,
        room: GIB / 2,
        failed_calls: 1,
        activations: 20 * GIB,
        parameters: GIB,
        ..Facts::default()
    }
}

pub(super) fn holder(fields: serde_json::Value) -> Holder {
    let mut row = json!({
        "walk": 1, "holder": "x", "verdict": "recent", "bytes": 6 * GIB, "tensors": 1, "graphs": 0, "nodes": 0,
        "first_step": 0, "last_step": 0, "steps": 1, "kind": "local", "name": "x", "owner": "main", "file": "train.py",
    });
    row.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let mut searches = RetainedSearches::default();
    searches.feed(&row.to_string());
    searches.feed(r#"{"walk":1,"why":"oom","step":0}"#);
    searches.all.remove(0).holders.remove(0)
}
