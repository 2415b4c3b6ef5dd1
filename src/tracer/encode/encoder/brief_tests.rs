use memtrace_trace::event::Block;
use memtrace_trace::rounding::Rounding;
use memtrace_trace::{Api, Header, Payload};

use super::*;

/// A sink that keeps the columns that the tests check: event, delta, allocated, active.
#[derive(Default)]
struct Rows(Vec<(EventName, i64, i64, i64)>);

impl RowSink for Rows {
    type Error = std::convert::Infallible;
    fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error> {
        self.0.push((row.event, row.delta_bytes, row.allocated_bytes, row.active_bytes));
        Ok(())
    }
}

/// A program with one device, whose allocator reports 1 MiB of segments.
struct Program {
    encoder: Encoder,
    allocated: i64,
    clock_ns: u64,
    /// The context of the next reports.
    context: u32,
    /// The step of the next reports.
    step: i32,
    window: Vec<(u32, Event)>,
}

impl Program {
    fn new() -> Program {
        let encoder = Encoder::new(0, 0, 1, Rounding::default(), true);
        Program { encoder, allocated: 0, clock_ns: 0, context: 0, step: 0, window: Vec::new() }
    }

    fn report(&mut self, address: u64, bytes: i64, deferred: bool) -> &mut Program {
        self.allocated += bytes;
        self.clock_ns += 1;
        let (allocated, reserved) = (self.allocated as usize, 1 << 20);
        let block =
            Block { address, bytes, allocated, reserved, requested: bytes.abs(), pool: 0, deferred, form: 0 };
        let header = Header::new(self.clock_ns, Api::CachingAllocator, 0);
        let event = Payload::Block(block).pack(Header { context: self.context, step: self.step, ..header });
        self.window.push((1, event));
        self
    }

    fn alloc(&mut self, address: u64, bytes: i64) -> &mut Program {
        self.report(address, bytes, false)
    }

    fn free(&mut self, address: u64, bytes: i64) -> &mut Program {
        self.report(address, -bytes, false)
    }

    /// Ends the window, and returns its rows. `None` if the window needs the rows of every block; they are
    /// then written.
    fn end(&mut self) -> Option<Vec<(EventName, i64, i64, i64)>> {
        let (mut rows, window) = (Rows::default(), std::mem::take(&mut self.window));
        let Some(plan) = self.encoder.plan_brief(&window) else {
            let Ok(()) = self.encoder.list_blocks(self.clock_ns, &mut rows);
            window.iter().for_each(|(tid, event)| {
                let Ok(()) = self.encoder.encode(*tid, event, &mut rows);
            });
            self.encoder.note_listed_peaks();
            return None;
        };
        let Ok(()) = self.encoder.encode_brief(&window, &plan, true, &mut rows);
        assert_eq!(self.encoder.totals(0).allocated, self.allocated);
        Some(rows.0)
    }

    /// Writes the rows of all live blocks.
    fn list(&mut self) -> Vec<(EventName, i64, i64, i64)> {
        let mut rows = Rows::default();
        let Ok(()) = self.encoder.list_blocks(self.clock_ns, &mut rows);
        rows.0
    }
}

use EventName::{Brief as Sum, Free, FreeCompleted, Live};

#[test]
fn short_lived_blocks_are_one_row_at_the_peak_and_one_at_the_end() {
    let mut program = Program::new();
    // The first window sets a peak, so it has the rows of every block.
    program.alloc(1, 4096).alloc(2, 8192).free(2, 8192);
    assert_eq!(program.end(), None);
    for _ in 0..3 {
        program.alloc(2, 2048).alloc(3, 512).free(2, 2048).alloc(2, 1024).free(2, 1024).free(3, 512);
        assert_eq!(program.end().unwrap(), [(Sum, 2560, 6656, 6656), (Sum, -2560, 4096, 4096)]);
    }
    // A block that has rows gets the row of its free.
    program.alloc(2, 512).free(1, 4096).free(2, 512);
    let rows = [(Sum, 512, 4608, 4608), (Free, -4096, 512, 512), (Sum, -512, 0, 0)];
    assert_eq!(program.end().unwrap(), rows);
    // A new peak: all blocks are written.
    program.alloc(2, 16384);
    assert_eq!(program.end(), None);
}

/// A block that the program names gets its rows; the workspace of an op does not.
#[test]
fn tagged_blocks_get_rows() {
    let tag = |address, category| {
        let claim = memtrace_trace::Claim::Strong;
        let tag = Payload::Tag { address, category, module: 0, name: 0, form: 0, claim };
        (1, tag.pack(Header::new(9, Api::Python, 0)))
    };
    let mut program = Program::new();
    program.alloc(1, 8192).free(1, 8192);
    assert_eq!(program.end(), None);
    program.alloc(1, 1024).window.push(tag(1, Category::Workspace));
    program.free(1, 1024).alloc(2, 512).window.push(tag(2, Category::OptimizerState));
    let rows = [
        (Sum, 1024, 1024, 1024),
        (Sum, -1024, 0, 0),
        (Live, 512, 512, 512),
        (EventName::Tag, -512, 512, 512),
        (EventName::Tag, 512, 512, 512),
        (Sum, 0, 512, 512),
    ];
    assert_eq!(program.end().unwrap(), rows);
}

/// A tag has no step, but the rows that it causes are rows of the window's step.
#[test]
fn rows_that_a_tag_causes_have_the_step_of_the_window() {
    let mut program = Program::new();
    program.alloc(1, 8192).free(1, 8192);
    assert_eq!(program.end(), None);
    program.step = 7;
    // The tag names a block of this window, and a block of an earlier window in a window without reports.
    for reports in [true, false] {
        if reports {
            program.alloc(2, 512).alloc(3, 512).alloc(4, 512);
            // A late free has the number of the next step.
            program.step = 8;
            program.free(4, 512);
        }
        let (address, category) = (2 + u64::from(!reports), Category::Gradient);
        let claim = memtrace_trace::Claim::Strong;
        let tag = Payload::Tag { address, category, module: 0, name: 0, form: 0, claim };
        program.window.push((1, tag.pack(Header::new(9, Api::Python, 0))));
        let mut rows = Steps::default();
        let window = std::mem::take(&mut program.window);
        let plan = program.encoder.plan_brief(&window).unwrap();
        let Ok(()) = program.encoder.encode_brief(&window, &plan, true, &mut rows);
        assert!(rows.0.len() >= 4 && rows.0.iter().all(|step| *step == 7), "{:?}", rows.0);
    }
}

/// A sink that keeps the step of each row.
#[derive(Default)]
struct Steps(Vec<i64>);

impl RowSink for Steps {
    type Error = std::convert::Infallible;
    fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error> {
        self.0.push(row.step);
        Ok(())
    }
}

#[test]
fn blocks_that_stay_get_rows_and_no_total_exceeds_the_peak() {
    let mut program = Program::new();
    program.alloc(1, 8192).free(1, 8192);
    assert_eq!(program.end(), None);
    program.alloc(1, 1024).alloc(2, 512);
    assert_eq!(program.end().unwrap(), [(Sum, 1536, 1536, 1536), (Sum, 0, 1536, 1536)]);
    // A gradient: it is freed in the next step, and never gets a row.
    program.free(2, 512).alloc(2, 512);
    assert_eq!(program.end().unwrap(), [(Sum, 0, 1536, 1536)]);
    program.free(2, 512).alloc(2, 512);
    assert_eq!(program.end().unwrap(), [(Sum, -1024, 512, 512), (Live, 1024, 1536, 1536)]);
    // The other block gets its row when the blocks are listed.
    assert_eq!(program.list(), [(Sum, -512, 1024, 1024), (Live, 512, 1536, 1536)]);
    assert_eq!(program.list(), []);
}

/// The sums by phase: the bytes of blocks without rows move to the phase of the next peak.
#[test]
fn rows_of_a_window_have_the_phase_of_its_peak() {
    let mut program = Program::new();
    let [forward, backward] = ["forward", "backward"].map(|phase| {
        let phase = program.encoder.definitions.own_text(phase);
        program.encoder.definitions.own_context(Context { phase, ..Context::default() })
    });
    program.alloc(1, 8192).free(1, 8192);
    assert_eq!(program.end(), None);
    let mut sums = std::collections::BTreeMap::new();
    for (context, kept) in [(forward, 11), (backward, 12), (backward, 13), (forward, 14)] {
        program.context = context;
        if kept > 11 {
            program.free(kept - 1, 512);
        }
        program.alloc(9, 2048).free(9, 2048);
        let mut rows = Phases::default();
        let window = std::mem::take(&mut program.window);
        let plan = program.encoder.plan_brief(&window).unwrap();
        let Ok(()) = program.encoder.encode_brief(&window, &plan, true, &mut rows);
        program.alloc(kept, 512);
        let window = std::mem::take(&mut program.window);
        let plan = program.encoder.plan_brief(&window).unwrap();
        let Ok(()) = program.encoder.encode_brief(&window, &plan, false, &mut rows);
        for (phase, bytes) in rows.0 {
            *sums.entry(phase).or_insert(0) += bytes;
        }
        let phase = if context == forward { "forward" } else { "backward" };
        assert_eq!(sums.values().sum::<i64>(), program.allocated);
        assert_eq!(sums[phase], program.allocated, "{sums:?}");
    }
}

/// A sink that keeps the phase and the bytes of each row.
#[derive(Default)]
struct Phases(Vec<(String, i64)>);

impl RowSink for Phases {
    type Error = std::convert::Infallible;
    fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error> {
        self.0.push((row.phase.to_owned(), row.delta_bytes));
        Ok(())
    }
}

#[test]
fn a_block_that_a_stream_still_uses_stays_active() {
    let mut program = Program::new();
    program.alloc(1, 8192).free(1, 8192);
    assert_eq!(program.end(), None);
    program.alloc(1, 1024).report(1, -1024, true);
    let rows =
        [(Sum, 1024, 1024, 1024), (Sum, -1024, 0, 0), (Live, 1024, 1024, 1024), (Free, -1024, 0, 1024)];
    assert_eq!(program.end().unwrap(), rows);
    let completed = Payload::FreeCompleted { address: 1 };
    let event = completed.pack(Header::new(program.clock_ns, Api::CachingAllocator, 0));
    program.alloc(2, 512).free(2, 512);
    program.window.push((1, event));
    let rows = [(Sum, 512, 512, 1536), (FreeCompleted, -1024, 512, 512), (Sum, -512, 0, 0)];
    assert_eq!(program.end().unwrap(), rows);
}
