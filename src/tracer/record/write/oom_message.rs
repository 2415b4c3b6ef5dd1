//! The lines that the traced process prints at an OOM.

use std::path::Path;
use std::time::{Duration, Instant};

use memtrace_encode::{Encoder, Live, OutOfMemory, Owner};
use memtrace_trace::config::Level;
use memtrace_trace::counts::counted;
use memtrace_trace::memory::Totals;
use memtrace_trace::text::{NO_CATEGORY, NO_OWNER, NONE, SCRIPT, UNKNOWN, WITHOUT_DETAIL, shell_word};
use memtrace_trace::units::Unit;
use memtrace_trace::{Category, Meta};
use rustc_hash::FxHashMap;

use crate::session::Session;

/// The number of owners that the message names.
const NAMED: usize = 5;
/// The maximum time for which the message of an OOM waits for tags. Python's main thread records the tags,
/// and it may be in a long call.
const TAGS: Duration = Duration::from_secs(3);
/// The maximum number of OOMs whose lines are printed. A script that searches for its batch size raises many
/// OOMs.
const MAX_PRINTED: u32 = 3;

/// The OOMs of a process. The lines of an OOM are printed shortly after the OOM, because the tensors of all
/// models are tagged only after it.
pub(crate) struct OomMessages {
    session: &'static Session,
    /// The number of OOMs that were printed or are pending.
    count: u32,
    /// The last OOM, until it is printed.
    pending: Option<OomSnapshot>,
}

impl OomMessages {
    pub(crate) fn new(session: &'static Session) -> OomMessages {
        OomMessages { session, count: 0, pending: None }
    }

    /// Returns true if an OOM waits to be printed.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Adds an OOM that was just encoded, and prints an earlier one that is still pending.
    pub(crate) fn add(&mut self, oom: OutOfMemory, encoder: &Encoder, meta: &Meta, trace: &Path) {
        if self.count < MAX_PRINTED && self.session.settings.log >= Level::Warn {
            self.count += 1;
            let earlier = self.pending.replace(OomSnapshot::new(encoder, oom));
            self.print(earlier, encoder, meta, trace);
        }
    }

    /// Prints a pending OOM if its blocks are tagged, or if the wait for tags has reached its limit.
    pub(crate) fn print_when_tagged(
        &mut self,
        is_tagged: bool,
        encoder: &Encoder,
        meta: &Meta,
        trace: &Path,
    ) {
        let waits = |snapshot: &OomSnapshot| !is_tagged && snapshot.since.elapsed() < TAGS;
        if !self.pending.as_ref().is_some_and(waits) {
            let pending = self.pending.take();
            self.print(pending, encoder, meta, trace);
        }
    }

    fn print(&self, snapshot: Option<OomSnapshot>, encoder: &Encoder, meta: &Meta, trace: &Path) {
        let trace = self.session.path_for_user(trace);
        for line in snapshot.map(|snapshot| snapshot.lines(encoder, meta, trace)).unwrap_or_default() {
            (self.session.say)(&line);
        }
    }
}

/// An OOM and the blocks that were live then.
struct OomSnapshot {
    oom: OutOfMemory,
    totals: Totals,
    live: Vec<Live>,
    /// The time at which the OOM was encoded.
    since: Instant,
}

impl OomSnapshot {
    fn new(encoder: &Encoder, oom: OutOfMemory) -> OomSnapshot {
        let of_device = |live: &&Live| live.device == oom.device && live.is_block();
        let live = encoder.live().filter(of_device).copied().collect();
        OomSnapshot { oom, totals: encoder.totals(oom.device), live, since: Instant::now() }
    }

    /// Returns the blocks of the snapshot, with the owners that are known now.
    fn tagged(&self, encoder: &Encoder) -> Vec<Live> {
        let now: FxHashMap<i64, &Live> = encoder.live().map(|live| (live.alloc_id, live)).collect();
        self.live.iter().map(|live| *now.get(&live.alloc_id).copied().unwrap_or(live)).collect()
    }

    /// Returns the lines of the message: the request and its owner, the totals, the owners of the memory, and
    /// the next command.
    fn lines(&self, encoder: &Encoder, meta: &Meta, trace: &Path) -> Vec<String> {
        let show = |bytes| Unit::Auto.show(bytes);
        let (oom, live) = (&self.oom, &self.tagged(encoder));
        let Totals { allocated, reserved, outside, .. } = self.totals;
        let device = i32::from(oom.device);
        let size = meta.total_bytes(device);
        let what = if oom.is_granted { "would have run out of memory" } else { "out of memory" };
        let mut first = format!("{what} on GPU {device}: {} were requested", show(oom.bytes));
        let asker = label(encoder.definitions().owner(oom.context));
        if asker != NO_OWNER {
            first += &format!(" by {asker}");
        }
        let form = encoder.definitions().form(oom.form);
        if form.shape != UNKNOWN {
            first += &format!(" for {} {}", form.dtype, form.shape);
        }
        if oom.is_granted {
            first += "; the program goes on (--past-oom)";
        }
        let mut second = format!("torch holds {} allocated in {} reserved", show(allocated), show(reserved));
        if outside > 0 {
            second += &format!(", libraries {}", show(outside));
        }
        for (name, bytes) in encoder.ledger(oom.device).1.parts() {
            second += &format!(", {name} {}", show(bytes));
        }
        if size > 0 {
            second += &format!(", of {} on the device", show(size));
        }
        let mut lines = vec![first, second];
        let categories: Vec<String> = by(live, |live| match live.category {
            Category::None => NO_CATEGORY.to_owned(),
            category => category.as_str().to_owned(),
        })
        .iter()
        .map(|(name, bytes)| format!("{name} {}", show(*bytes)))
        .collect();
        if !categories.is_empty() {
            lines.push(format!("for: {}", categories.join(", ")));
        }
        let holders = by(live, |live| label(encoder.definitions().owner(live.context)));
        let width = holders.iter().take(NAMED).map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, bytes) in holders.iter().take(NAMED) {
            let share = *bytes as f64 * 100.0 / allocated.max(1) as f64;
            lines.push(format!("  {name:width$}  {:>12}  {share:5.1} %", show(*bytes).to_string()));
        }
        if holders.len() > NAMED {
            let rest: i64 = holders[NAMED..].iter().map(|(_, bytes)| bytes).sum();
            let more = counted((holders.len() - NAMED) as u64, "more owner");
            lines.push(format!("  and {more} with {}", show(rest)));
        }
        let trace = shell_word(&trace.display().to_string());
        lines.push(format!("next: memtrace oom {trace}, memtrace ledger --at oom {trace}"));
        lines
    }
}

/// Groups the live blocks by `name`. Returns the name and the bytes of each group, largest first.
fn by(live: &[Live], name: impl Fn(&Live) -> String) -> Vec<(String, i64)> {
    let mut owners: FxHashMap<String, i64> = FxHashMap::default();
    for live in live {
        *owners.entry(name(live)).or_default() += live.bytes;
    }
    let mut owners: Vec<_> = owners.into_iter().collect();
    owners.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    owners
}

/// Returns the name of an owner: its module, or outside every module its op and phase.
fn label(owner: Owner<'_>) -> String {
    let Owner { op, module, phase } = owner;
    if ![NONE, SCRIPT, WITHOUT_DETAIL].contains(&module) {
        return module.to_owned();
    }
    let name = if op == NONE { module } else { op };
    match (name, phase) {
        (NONE, NONE) => NO_OWNER.to_owned(),
        (NONE, phase) => phase.to_owned(),
        (name, NONE) => name.to_owned(),
        (name, phase) => format!("{name} ({phase})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_encode::RowSink;
    use memtrace_trace::context::Context;
    use memtrace_trace::event::{Block, Payload};
    use memtrace_trace::rounding::Rounding;
    use memtrace_trace::{Api, Claim, Header, Row};

    struct Nowhere;
    impl RowSink for Nowhere {
        type Error = std::convert::Infallible;
        fn row(&mut self, _: &Row<'_>) -> Result<(), Self::Error> {
            Ok(())
        }
    }

    #[test]
    fn an_oom_message_names_the_largest_owner_first_and_the_next_command_last() {
        let mut encoder = Encoder::new(0, 0, 1, Rounding::default(), true);
        encoder.definitions_mut().define_text(1, "GPT.h.0");
        encoder.definitions_mut().define_context(1, Context { module: 1, ..Context::default() });
        let header = Header::new(0, Api::CachingAllocator, 0);
        let block = |context, address, bytes, allocated| {
            let block = Block {
                address,
                bytes,
                allocated,
                reserved: 0,
                requested: -1,
                pool: 0,
                deferred: false,
                form: 0,
            };
            Payload::Block(block).pack(Header { context, ..header })
        };
        let events = [block(0, 1, 512, 512), block(1, 2, 4096, 4608)];
        for event in &events {
            let Ok(()) = encoder.encode(1, event, &mut Nowhere);
        }
        let oom = OutOfMemory { device: 0, bytes: 1 << 30, context: 0, form: 3, is_granted: false };
        let snapshot = OomSnapshot::new(&encoder, oom);
        // Setup: before the lines are printed, the first block is tagged and the second one freed -> both are
        // listed, and the first one with its tag.
        encoder.definitions_mut().define_text(2, "GPT.head");
        encoder.definitions_mut().define_text(3, "float32 [64x1024x4096]");
        let after = [
            Payload::Tag {
                address: 1,
                category: Category::Parameter,
                module: 2,
                name: 0,
                form: 0,
                claim: Claim::Strong,
            }
            .pack(header),
            block(1, 2, -4096, 512),
        ];
        for event in &after {
            let Ok(()) = encoder.encode(1, event, &mut Nowhere);
        }
        let lines = snapshot.lines(&encoder, &Meta::default(), Path::new("t.csv"));
        assert_eq!(lines[0], "out of memory on GPU 0: 1.00 GiB were requested for float32 [64x1024x4096]");
        assert_eq!(lines[2], "for: (no category) 4.00 KiB, parameter 512 B");
        assert!(lines[3].trim_start().starts_with("GPT.h.0") && lines[3].contains("88.9 %"), "{}", lines[3]);
        assert!(lines[4].contains("GPT.head"));
        assert_eq!(lines.last().unwrap(), "next: memtrace oom t.csv, memtrace ledger --at oom t.csv");
        // Setup: an OOM at the first request of the program -> no owners are listed, because no blocks are
        // live.
        let encoder = Encoder::new(0, 0, 1, Rounding::default(), true);
        let lines = OomSnapshot::new(&encoder, oom).lines(&encoder, &Meta::default(), Path::new("t.csv"));
        assert_eq!(lines.len(), 3, "{lines:?}");
        let oom = OutOfMemory { is_granted: true, form: 0, ..oom };
        let lines = OomSnapshot::new(&encoder, oom).lines(&encoder, &Meta::default(), Path::new("t.csv"));
        assert_eq!(
            lines[0],
            "would have run out of memory on GPU 0: 1.00 GiB were requested; the program goes on (--past-oom)"
        );
    }
}
