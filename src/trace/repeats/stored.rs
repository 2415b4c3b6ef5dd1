//! A row that outlives the line or the event from which it was created.

use std::sync::Arc;

use super::{Numbers, Repeatable};
use crate::columns::Row;

/// A stored row. Rows that repeat each other share everything except their numbers.
#[derive(Clone, Debug)]
pub struct StoredRow {
    pub(super) numbers: Numbers,
    pub(super) rest: Arc<Rest>,
}

/// The columns that a repeat does not change. Equal rows share them.
#[derive(Debug)]
pub(super) struct Rest {
    /// The numbers. The texts are placeholders.
    row: Row<'static>,
    texts: [Arc<str>; TEXTS],
}

/// The number of columns of type `text`.
const TEXTS: usize = 6;

fn texts<'a>(row: &Row<'a>) -> [&'a str; TEXTS] {
    [row.api, row.source, row.op, row.module, row.phase, row.name]
}

impl StoredRow {
    /// Stores a row. Shares the texts that it has in common with `before`.
    #[must_use]
    pub fn new(row: &Row<'_>, before: Option<&StoredRow>) -> StoredRow {
        let mut index = 0;
        let texts = texts(row).map(|text| {
            let known = before.map(|before| &before.rest.texts[index]).filter(|known| ***known == *text);
            index += 1;
            known.map_or_else(|| Arc::from(text), Arc::clone)
        });
        let row_alone = numbers_alone(row);
        StoredRow { numbers: Numbers::of(row), rest: Arc::new(Rest { row: row_alone, texts }) }
    }

    /// Returns the row with its numbers and its texts.
    #[must_use]
    pub fn row(&self) -> Row<'_> {
        let Numbers { seq, ts_ns, device, event, alloc_id, addr, totals, step } = self.numbers;
        let [api, source, op, module, phase, name] = self.rest.texts.each_ref().map(|text| &**text);
        let [allocated_bytes, active_bytes, reserved_bytes] = totals;
        Row {
            seq,
            ts_ns,
            device,
            event,
            alloc_id,
            addr,
            allocated_bytes,
            active_bytes,
            reserved_bytes,
            step,
            api,
            source,
            op,
            module,
            phase,
            name,
            ..self.rest.row
        }
    }

    /// Returns true if `row` equals this row in all columns that a repeat does not change.
    pub(super) fn fits(&self, row: &Row<'_>) -> bool {
        let Rest { row: own, texts: own_texts } = &*self.rest;
        let Numbers { device, event, addr, .. } = self.numbers;
        (addr, device, event) == (row.addr, row.device, row.event)
            && (own.delta_bytes, own.requested_bytes, own.rounded_bytes)
                == (row.delta_bytes, row.requested_bytes, row.rounded_bytes)
            && (own.tid, own.rank, own.pid, own.status) == (row.tid, row.rank, row.pid, row.status)
            && (own.stream, own.pool, own.stack_id, own.latency_ns)
                == (row.stream, row.pool, row.stack_id, row.latency_ns)
            && (own.category, own.device_free_bytes) == (row.category, row.device_free_bytes)
            && own_texts.iter().zip(texts(row)).all(|(own, text)| **own == *text)
    }
}

impl Repeatable for StoredRow {
    fn numbers(&self) -> Numbers {
        self.numbers
    }

    fn set_numbers(&mut self, numbers: &Numbers) {
        self.numbers = *numbers;
    }
}

/// Returns a row with the numbers of `row` and without its texts.
fn numbers_alone(row: &Row<'_>) -> Row<'static> {
    Row {
        rank: row.rank,
        pid: row.pid,
        tid: row.tid,
        status: row.status,
        requested_bytes: row.requested_bytes,
        rounded_bytes: row.rounded_bytes,
        delta_bytes: row.delta_bytes,
        device_free_bytes: row.device_free_bytes,
        category: row.category,
        stream: row.stream,
        pool: row.pool,
        latency_ns: row.latency_ns,
        stack_id: row.stack_id,
        ..Row::default()
    }
}
