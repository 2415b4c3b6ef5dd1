//! Evidence and holders for tests.

use memtrace_trace::{Api, EventName};
use serde_json::json;

use super::evidence::{Evidence, StepTotals};
use super::module_calls::ModuleCalls;
use crate::read::record::Record;
use crate::state::replay::Replay;
use crate::state::retained::{Holder, RetainedSearches};

pub(super) const GIB: i64 = 1 << 30;
pub(super) const MIB: i64 = 1 << 20;

/// Adds a call of the module `path` in the replay's step.
pub(super) fn call(calls: &mut ModuleCalls, replay: &Replay, path: &str, seq: i64) {
    let row = Record {
        event: EventName::RangeBegin,
        api: replay.symbols.intern(Api::Module.as_str()),
        name: replay.symbols.intern(path),
        seq,
        ..Record::default()
    };
    calls.feed(&row, replay);
}

/// Returns the evidence of a full card: 23 of 24 GiB are reserved, and 1 GiB is requested.
pub(super) fn full() -> Evidence {
    Evidence::default().with(|e| {
        e.device.capacity = 24 * GIB;
        e.request.bytes = GIB;
        e.request.segment = GIB;
        e.torch.allocated = 22 * GIB;
        e.torch.reserved = 23 * GIB;
        e.device.unknown = GIB / 2;
        e.device.room = GIB / 2;
        e.request.failed_calls = 1;
        e.live.activations = 20 * GIB;
        e.live.parameters = GIB;
    })
}

impl Evidence {
    /// Returns a copy with other evidence.
    pub(super) fn with(&self, change: impl FnOnce(&mut Evidence)) -> Evidence {
        let mut changed = self.clone();
        change(&mut changed);
        changed
    }

    pub(super) fn verdict(&self) -> &'static str {
        self.judge().cause.verdict
    }
}

/// Returns steps that end with these allocated bytes, each with a peak of 10 GiB more.
pub(super) fn steps(ends: &[i64]) -> Vec<StepTotals> {
    let step = |ended: &i64| StepTotals {
        began: *ended,
        ended: *ended,
        peak: ended + 10 * GIB,
        peak_before_update: ended + 10 * GIB,
        parameters: 0,
    };
    ends.iter().map(step).collect()
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
