//! Small traces that end in an OOM, and the lines that `memtrace oom` prints about them, for the tests of findings.

use std::sync::atomic::{AtomicUsize, Ordering};

use memtrace_trace::meta::{Device, Meta};
use memtrace_trace::{Api, Category, EventName, Row, files};
use serde_json::{Value, json};

use super::super::report::Report;
use super::Oom;
use super::test_evidence::{GIB, MIB};
use crate::options::Options;
use crate::read::input::Input;
use crate::testing::TraceBuilder;

/// The header of the file of stacks.
const STACKS: &str = "stack_id,parent_id,frame,kind\n";
/// The CUDA context of the card.
const CONTEXT: i64 = 512 * MIB;

/// A trace of one card that runs out of memory. Each block has a segment of its own, so that no memory is free in the
/// cache, except that of [`OomTrace::hole`].
pub(super) struct OomTrace {
    rows: TraceBuilder,
    /// The rows of the stacks beside the trace.
    stacks: String,
    card: i64,
    /// The bytes of this process in traced calls.
    taken: i64,
    /// The bytes in use beside them at the last sample.
    beside: i64,
    ending: String,
}

/// Returns the owner of a block: the module, the phase and the step, with the category that the tracer gives it.
pub(super) fn owner<'a>(module: &'a str, phase: &'a str, step: i64) -> Row<'a> {
    let category = match phase {
        "forward" => Category::Activation,
        "backward" | "optimizer" => Category::Temporary,
        _ if module == "(script)" => Category::Script,
        _ => Category::None,
    };
    Row { module, phase, step, category, ..Row::default() }
}

impl OomTrace {
    /// Returns the trace of a card of `card` bytes, whose free memory was sampled when only a CUDA context was there.
    pub(super) fn new(card: i64) -> OomTrace {
        let mut trace = OomTrace::without_sample(card, Meta::default());
        trace.sample(CONTEXT, "others=0");
        trace
    }

    /// Returns the trace of a card whose free memory was not sampled.
    pub(super) fn without_sample(card: i64, meta: Meta) -> OomTrace {
        let devices = vec![Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: card }];
        let rows = TraceBuilder::new(Meta { devices, ..meta });
        let mut trace =
            OomTrace { rows, stacks: STACKS.to_owned(), card, taken: 0, beside: 0, ending: String::new() };
        // With a tag, no category is inferred.
        trace.parameter(512, "Net");
        trace
    }

    /// Adds a sample of the device's free memory. `beside` are the bytes in use outside of this process's allocator,
    /// `more` are further values, such as `others=0`.
    pub(super) fn sample(&mut self, beside: i64, more: &str) {
        self.beside = beside;
        let free = self.card - self.taken - beside;
        let name = format!("total={} free={free} {more}", self.card);
        let event = EventName::Sample;
        self.rows
            .change(Row { device: 0, event, device_free_bytes: free, name: &name, ..Row::default() }, [0; 3]);
    }

    fn segment(&mut self, bytes: i64) {
        self.taken += bytes;
        self.rows.segment(bytes);
    }

    /// Allocates a block and returns its `alloc_id`.
    pub(super) fn block(&mut self, bytes: i64, row: Row<'_>) -> i64 {
        self.segment(bytes);
        self.rows.alloc(bytes, row)
    }

    /// Allocates a block on another device of the process.
    pub(super) fn block_on_another_device(&mut self, bytes: i64, row: Row<'_>) {
        self.rows.alloc(bytes, Row { device: 1, ..row });
    }

    /// Allocates a block that leaves this much of the card.
    pub(super) fn fill(&mut self, left: i64, row: Row<'_>) {
        self.block(self.card - self.taken - self.beside - left, row);
    }

    /// Frees a block and its segment.
    pub(super) fn free(&mut self, alloc_id: i64, bytes: i64, row: Row<'_>) {
        self.rows.free(alloc_id, bytes, row);
        self.segment(-bytes);
    }

    /// Allocates a block and gives it a category later. Returns its `alloc_id`.
    pub(super) fn tagged(&mut self, bytes: i64, category: Category, row: Row<'_>) -> i64 {
        let id = self.block(bytes, row);
        self.rows.tag(id, bytes, row, Row { category, ..row });
        id
    }

    /// Allocates a parameter before the first step.
    pub(super) fn parameter(&mut self, bytes: i64, module: &str) {
        self.tagged(bytes, Category::Parameter, owner(module, "init", -1));
    }

    /// Allocates memory outside of torch's allocator.
    pub(super) fn outside(&mut self, bytes: i64) {
        let event = EventName::ExtAlloc;
        self.taken += bytes;
        let row = Row {
            device: 0,
            event,
            api: "cudaMalloc",
            alloc_id: i64::MAX >> 1,
            delta_bytes: bytes,
            ..Row::default()
        };
        self.rows.change(row, [0; 3]);
    }

    /// Adds a segment without a block to a pool; 0 is the default pool.
    pub(super) fn hole(&mut self, bytes: i64, pool: i64) {
        let event = EventName::SegmentAlloc;
        self.taken += bytes;
        let row = Row { device: 0, event, addr: 1 << 20, delta_bytes: bytes, pool, ..Row::default() };
        self.rows.change(row, [0, 0, bytes]);
    }

    /// Calls a module of this class.
    pub(super) fn call(&mut self, module: &str, class: &str, step: i64) {
        let row = Row {
            api: Api::Module.as_str(),
            name: module,
            source: class,
            ..owner("(none)", "forward", step)
        };
        self.rows.raw(Row { event: EventName::RangeBegin, ..row });
    }

    /// Ends an op.
    pub(super) fn op(&mut self, row: Row<'_>) {
        self.rows.change(Row { device: 0, event: EventName::Op, ..row }, [0; 3]);
    }

    /// Adds a row of a backward.
    pub(super) fn backward(&mut self, step: i64) {
        self.rows.raw(Row { event: EventName::RangeEnd, ..owner("(none)", "backward", step) });
    }

    /// Adds a fact about a model: `mode=eval Net`.
    pub(super) fn fact(&mut self, name: &str, step: i64) {
        self.mark(Api::ModelFact.as_str(), name, step);
    }

    /// Adds a mark. The phase of the program does not change.
    pub(super) fn mark(&mut self, api: &str, name: &str, step: i64) {
        self.rows.raw(Row { event: EventName::Mark, api, name, ..owner("(none)", "forward", step) });
    }

    /// Adds the search at the OOM, which finds these holders. Call it after [`OomTrace::fails`].
    pub(super) fn found(&mut self, holders: &[Value]) {
        for fields in holders {
            let mut row = json!({
                "walk": 1, "holder": "variable `x` (train.py:7)", "verdict": "recent", "bytes": 6 * GIB, "tensors": 1,
                "graphs": 0, "nodes": 0, "first_step": 0, "last_step": 0, "steps": 1, "kind": "local", "name": "x",
                "owner": "main", "file": "train.py",
            });
            row.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            self.mark(Api::Retained.as_str(), &row.to_string(), -1);
        }
        self.mark(Api::Retained.as_str(), r#"{"walk":1,"why":"oom","step":0}"#, -1);
    }

    /// Fails a request after CUDA has refused the segment.
    pub(super) fn fails(&mut self, bytes: i64, row: Row<'_>) {
        let refused = Row { device: 0, event: EventName::SegmentAlloc, status: 2, api: "cudaMalloc", ..row };
        self.rows.change(Row { category: Category::None, ..refused }, [0; 3]);
        self.fails_at_once(bytes, row);
    }

    /// Fails a request without a call of CUDA.
    pub(super) fn fails_at_once(&mut self, bytes: i64, row: Row<'_>) {
        let oom =
            Row { event: EventName::Oom, device: 0, requested_bytes: bytes, rounded_bytes: bytes, ..row };
        self.rows.change(oom, [0; 3]);
    }

    /// Adds a stack of one frame, an `op` or a line of `python`, and returns its id.
    pub(super) fn stack(&mut self, kind: &str, frame: &str) -> i64 {
        let id = self.stacks.lines().count();
        self.stacks.push_str(&format!("{id},0,{frame},{kind}\n"));
        id as i64
    }

    /// Sets the need of the run, which was measured.
    pub(super) fn needed(&mut self, bytes: i64) {
        self.ending = format!("exit needed_bytes={bytes} lost=0");
    }

    /// Returns the lines that `memtrace oom` prints, from the verdict to the last remedy.
    fn lines(mut self) -> Vec<String> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("memtrace-oom-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("a.csv");
        self.rows.raw(Row { event: EventName::End, api: "memtrace", name: &self.ending, ..Row::default() });
        std::fs::write(&path, self.rows.unfinished()).unwrap();
        std::fs::write(files::stacks(&path), self.stacks).unwrap();
        let answer = Oom.run(&[Input::open(&path).unwrap()], &Options::default()).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let text = answer.text();
        let lines = text.lines().skip_while(|line| !line.starts_with("verdict: "));
        lines.take_while(|line| !line.is_empty()).map(|line| line.trim().to_owned()).collect()
    }

    /// Checks that `memtrace oom` prints each of these lines.
    #[track_caller]
    pub(super) fn prints(self, expected: &[&str]) {
        let lines = self.lines();
        for line in expected {
            assert!(
                lines.iter().any(|printed| printed == line),
                "{line}\nis not among\n{}",
                lines.join("\n")
            );
        }
    }

    /// Checks that `memtrace oom` prints no line with this text.
    #[track_caller]
    pub(super) fn never_prints(self, text: &str) {
        let lines = self.lines();
        assert!(
            !lines.is_empty() && !lines.iter().any(|line| line.contains(text)),
            "{text}\nis among\n{}",
            lines.join("\n")
        );
    }
}
