use memtrace_trace::context::Context;
use memtrace_trace::end_row::Ending;
use memtrace_trace::event::{AllocCall, Block, Call};
use memtrace_trace::text::{NONE, WITHOUT_DETAIL};
use memtrace_trace::{Category, Header, Row};

use super::*;

/// A sink that keeps the columns that the tests check: seq, event, alloc_id, delta, allocated, reserved,
/// module.
#[derive(Default)]
struct Rows(Vec<(i64, EventName, i64, i64, i64, i64, String)>);

impl RowSink for Rows {
    type Error = std::convert::Infallible;
    fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error> {
        let Row { seq, event, alloc_id, delta_bytes, allocated_bytes, reserved_bytes, module, .. } = *row;
        self.0.push((seq, event, alloc_id, delta_bytes, allocated_bytes, reserved_bytes, module.to_owned()));
        Ok(())
    }
}

/// A sink that keeps the pools of blocks.
#[derive(Default)]
struct Pools(Vec<i64>);

impl RowSink for Pools {
    type Error = std::convert::Infallible;
    fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error> {
        if row.event == EventName::Alloc {
            self.0.push(row.pool);
        }
        Ok(())
    }
}

/// A sink that keeps the names of rows.
#[derive(Default)]
struct Names(Vec<String>);

impl RowSink for Names {
    type Error = std::convert::Infallible;
    fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error> {
        self.0.push(row.name.to_owned());
        Ok(())
    }
}

fn encoder() -> Encoder {
    Encoder::new(0, 0, 1, Rounding::default(), true)
}

fn header(api: Api, device: i8, context: u32) -> Header {
    Header { context, ..Header::new(0, api, device) }
}

fn block_of(context: u32, address: u64, bytes: i64, allocated: usize, reserved: usize) -> Event {
    let block =
        Block { address, bytes, allocated, reserved, requested: -1, pool: 0, deferred: false, form: 0 };
    Payload::Block(block).pack(header(Api::CachingAllocator, 0, context))
}

fn block(address: u64, bytes: i64, allocated: usize, reserved: usize) -> Event {
    block_of(0, address, bytes, allocated, reserved)
}

fn call(address: u64, bytes: i64, status: i16) -> Call {
    Call {
        address,
        bytes,
        status,
        latency_ns: 0,
        library: 0,
        user: 0,
        pool: 0,
        from_torch_allocator: true,
        unreported: false,
    }
}

fn segment(address: u64, bytes: i64, status: i16) -> Event {
    let alloc = AllocCall { call: call(address, bytes, status), requested: bytes, handle: 0 };
    Payload::DeviceAlloc(alloc).pack(header(Api::CudaMalloc, 0, 0))
}

fn run(encoder: &mut Encoder, events: &[Event]) -> Rows {
    let mut rows = Rows::default();
    for event in events {
        encoder.encode(1, event, &mut rows).unwrap();
    }
    rows
}

#[test]
fn a_block_in_a_segment_of_a_private_pool_has_this_pool_even_if_its_report_has_none() {
    const END: u64 = 2 << 20;
    let in_pool = |pool| {
        let call = Call { pool, ..call(64, 2 << 20, 0) };
        let alloc = AllocCall { call, requested: 2 << 20, handle: 0 };
        Payload::DeviceAlloc(alloc).pack(header(Api::CudaMalloc, 0, 0))
    };
    let free = Payload::DeviceFree(call(64, 0, 0)).pack(header(Api::CudaFree, 0, 0));
    let events = [
        in_pool(3),
        block(64, 512, 512, 2 << 20),
        block(64 + END - 512, 512, 1024, 2 << 20),
        block(64 + END, 512, 1536, 2 << 20),
        block(0, 64, 1600, 2 << 20),
        free,
        in_pool(0),
        block(1024, 512, 2112, 2 << 20),
    ];
    let (mut encoder, mut pools) = (encoder(), Pools::default());
    for event in &events {
        encoder.encode(1, event, &mut pools).unwrap();
    }
    let Pools(pools) = pools;
    assert_eq!(pools, [3, 3, 0, 0, 0]);
}

#[test]
fn the_mark_of_a_step_has_its_number_and_other_marks_have_their_text() {
    let mut encoder = encoder();
    encoder.definitions_mut().define_text(1, memtrace_trace::ranges::STEP);
    encoder.definitions_mut().define_text(2, "step:x");
    let mut names = Names::default();
    for (name, step) in [(1, 70_000), (1, -1), (2, 3), (0, 3)] {
        let mark = Payload::Mark { name }.pack(Header { step, ..header(Api::Memtrace, Event::HOST, 0) });
        encoder.encode(1, &mark, &mut names).unwrap();
    }
    assert_eq!(names.0, ["step:70000", "step:-1", "step:x", NONE]);
}

#[test]
fn a_block_and_its_segment_may_have_the_same_address() {
    let events = [segment(64, 2 << 20, 0), block(64, 512, 512, 2 << 20), block(64, -512, 0, 2 << 20)];
    let rows = run(&mut encoder(), &events).0;
    let expected = [
        (1, EventName::SegmentAlloc, 1, 2 << 20, 0, 2 << 20, NONE.to_owned()),
        (2, EventName::Alloc, 2, 512, 512, 2 << 20, NONE.to_owned()),
        (3, EventName::Free, 2, -512, 0, 2 << 20, NONE.to_owned()),
    ];
    assert_eq!(rows, expected);
}

#[test]
fn a_failed_call_changes_nothing_and_an_unseen_segment_is_reconciled() {
    let mut encoder = encoder();
    let rows = run(&mut encoder, &[segment(0, 1 << 30, 2), block(64, 512, 512, 2 << 20)]).0;
    assert_eq!(rows[0], (1, EventName::SegmentAlloc, 0, 0, 0, 0, NONE.to_owned()));
    assert_eq!(rows[1].1, EventName::SegmentMap);
    assert_eq!(rows[1].3, 2 << 20);
    assert_eq!(encoder.anomalies.corrections, 1);
}

#[test]
fn a_free_carries_the_owner_of_its_allocation_and_a_reused_address_gets_a_new_id() {
    let mut encoder = encoder();
    encoder.definitions.define_text(1, "GPT.h.0");
    encoder.definitions.define_context(1, Context { module: 1, ..Context::default() });
    let owned = block_of(1, 64, 512, 512, 0);
    let rows = run(&mut encoder, &[owned, block(64, -512, 0, 0), block(64, 512, 512, 0)]).0;
    assert_eq!((rows[1].2, rows[1].6.as_str()), (1, "GPT.h.0"));
    assert_eq!((rows[2].2, rows[2].6.as_str()), (3, NONE));
}

#[test]
fn a_lost_free_is_made_up_for_when_its_address_or_the_total_shows_it() {
    let mut encoder = encoder();
    // Setup: the frees of two blocks are missing. The address 64 is allocated again, so its free is added.
    // The block at 4096 is missing only in the allocator's total -> the total is corrected.
    let events = [block(64, 512, 512, 0), block(4096, 1024, 1536, 0), block(64, 512, 512, 0)];
    let rows = run(&mut encoder, &events).0;
    let second: Vec<_> = rows.iter().skip(2).map(|row| (row.0, row.1, row.2, row.3, row.4)).collect();
    assert_eq!(second, [(3, EventName::Free, 1, -512, 1024), (4, EventName::Alloc, 4, 512, 512)]);
    let Totals { allocated, active, .. } = encoder.totals(0);
    assert_eq!((allocated, active), (512, 512));
    assert_eq!((encoder.anomalies.missed_frees, encoder.anomalies.gaps), (1, 1));
}

#[test]
fn each_block_that_outlives_an_optimizers_step_is_its_state_however_many_there_are() {
    let mut encoder = encoder();
    encoder.definitions.define_text(1, "optimizer");
    encoder.definitions.define_text(2, "forward");
    encoder.definitions.define_context(1, Context { phase: 1, ..Context::default() });
    encoder.definitions.define_context(2, Context { phase: 2, ..Context::default() });
    let count = 3000;
    let mut events: Vec<Event> = (1..=count).map(|n| block_of(1, n as u64 * 512, 512, n * 512, 0)).collect();
    // One of the blocks is freed within the step -> it does not become optimizer state.
    events.push(block(512, -512, (count - 1) * 512, 0));
    events.push(block_of(2, 1 << 30, 512, count * 512, 0));
    let mut rows = Categories::default();
    for event in &events {
        encoder.encode(1, event, &mut rows).unwrap();
    }
    let state = rows.0.iter().filter(|row| **row == (EventName::Tag, 512, Category::OptimizerState)).count();
    assert_eq!(state, count - 1);
}

/// A sink that keeps the event, the bytes and the category of each row.
#[derive(Default)]
struct Categories(Vec<(EventName, i64, Category)>);

impl RowSink for Categories {
    type Error = std::convert::Infallible;
    fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error> {
        self.0.push((row.event, row.delta_bytes, row.category));
        Ok(())
    }
}

#[test]
fn buffer_that_ranks_reduce_is_a_gradient_unless_a_backward_allocated_it() {
    /// A sink that keeps the module and the category that each tag assigns.
    #[derive(Default)]
    struct Owners(Vec<(String, Category)>);
    impl RowSink for Owners {
        type Error = std::convert::Infallible;
        fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error> {
            if row.event == EventName::Tag && row.delta_bytes > 0 {
                self.0.push((row.module.to_owned(), row.category));
            }
            Ok(())
        }
    }
    let texts = ["forward", "backward", WITHOUT_DETAIL, "Net", "bucket"];
    let [forward, backward, without, net, bucket] = [1, 2, 3, 4, 5];
    // Returns the tags of a block that is allocated in this phase and then reduced: twice in a step without
    // detail (no module), and twice in a detailed step.
    let categories =
        |phase: u32, module: u32, flags: u8| {
            let mut encoder = encoder();
            for (text, id) in texts.into_iter().zip(1..) {
                encoder.definitions.define_text(id, text);
            }
            encoder.definitions.define_context(1, Context { phase, module, flags, ..Context::default() });
            let reduced =
                |module| {
                    let (category, claim) = (Category::Gradient, memtrace_trace::Claim::Reduced);
                    Payload::Tag { address: 512, category, module, name: bucket, form: 0, claim }
                        .pack(header(Api::Memtrace, 0, 0))
                };
            let events = [block_of(1, 512, 512, 512, 0), reduced(0), reduced(0), reduced(net), reduced(net)];
            let mut owners = Owners::default();
            for event in &events {
                encoder.encode(1, event, &mut owners).unwrap();
            }
            owners.0
        };
    let named = |module: &str| (module.to_owned(), Category::Gradient);
    let unseen = Context::WITHOUT_DETAIL;
    // A block that the backward allocated (FSDP and tensor parallelism do this for the sum) -> no tag.
    assert_eq!(categories(backward, net, 0), []);
    assert_eq!(categories(backward, without, unseen), []);
    // A block that was allocated outside every phase or in a forward, like the buckets of DDP -> a gradient.
    // It gets a module as soon as a tag names one.
    assert_eq!(categories(0, 0, 0), [named(NONE), named("Net")]);
    assert_eq!(categories(forward, net, 0), [named("Net")]);
    assert_eq!(categories(forward, without, unseen), [named(WITHOUT_DETAIL), named("Net")]);
}

/// The form has another text id after a resume.
#[test]
fn a_tag_with_a_known_form_writes_no_rows_after_a_resume() {
    let mut encoder = encoder();
    let row = Row {
        event: EventName::Alloc,
        api: Api::CachingAllocator.as_str(),
        alloc_id: 1,
        device: 0,
        addr: 512,
        requested_bytes: 8,
        delta_bytes: 512,
        category: Category::Parameter,
        dtype: "bfloat16",
        shape: "[2x2]",
        ..Row::default()
    };
    encoder.restore_row(&row);
    for (id, form) in
        [(1, "bfloat16 [2x2]"), (2, "float32 [2]"), (3, "float32 [4x1]"), (4, "int8 ?"), (5, "float64 [4]")]
    {
        encoder.definitions.define_text(id, form);
    }
    let tag = |form| {
        let (category, claim) = (Category::Parameter, memtrace_trace::Claim::Strong);
        Payload::Tag { address: 512, category, module: 0, name: 0, form, claim }.pack(header(
            Api::Python,
            0,
            0,
        ))
    };
    let mut forms = |form| {
        let mut sink = FormSink::default();
        encoder.encode(1, &tag(form), &mut sink).unwrap();
        sink.0
    };
    assert_eq!(forms(1), [""; 0]);
    assert_eq!(forms(2), ["bfloat16 [2x2]", "float32 [2]"]);
    // A tensor with more bytes than the block is expanded. The block keeps its shape if the type is the same.
    assert_eq!(forms(3), [""; 0]);
    assert_eq!(forms(5), ["float32 [2]", "float64 ?"]);
    assert_eq!(forms(4), ["float64 ?", "int8 ?"]);
}

/// A sink that keeps the type and shape of each row.
#[derive(Default)]
struct FormSink(Vec<String>);

impl RowSink for FormSink {
    type Error = std::convert::Infallible;
    fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error> {
        self.0.push(format!("{} {}", row.dtype, row.shape));
        Ok(())
    }
}

#[test]
fn with_caching_off_a_call_is_a_block() {
    let mut encoder = Encoder::new(0, 0, 1, Rounding { caching: false, power2_divisions: 0 }, false);
    let free = Payload::DeviceFree(call(64, 0, 0)).pack(header(Api::CudaFree, Event::UNKNOWN_DEVICE, 0));
    let rows = run(&mut encoder, &[segment(64, 1000, 0), free]).0;
    assert_eq!(rows[0], (1, EventName::Alloc, 1, 1000, 1000, 1000, NONE.to_owned()));
    assert_eq!(rows[1], (2, EventName::Free, 1, -1000, 0, 0, NONE.to_owned()));
}

#[test]
fn lost_events_are_reported_once() {
    let mut encoder = encoder();
    let lost = Payload::Lost { events: 5 }.pack(header(Api::Memtrace, 0, 0));
    let mut rows = run(&mut encoder, &[lost]);
    encoder.end(9, 7, Ending::Exit, "", &mut rows).unwrap();
    let names: Vec<EventName> = rows.0.iter().map(|row| row.1).collect();
    assert_eq!(names, [EventName::Lost, EventName::Lost, EventName::End]);
}

#[test]
fn the_end_row_counts_the_texts_that_look_like_formulas_unless_another_encoder_knew_some() {
    struct Name(String);
    impl RowSink for Name {
        type Error = std::convert::Infallible;
        fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error> {
            row.name.clone_into(&mut self.0);
            Ok(())
        }
    }
    let mut name = Name(String::new());
    let mut encoder = encoder();
    for (id, text) in ["GPT.h.0", "=1+1", "'=1", "12", "nan", "@x"].into_iter().enumerate() {
        encoder.definitions.define_text(id as u32 + 1, text);
    }
    encoder.end(9, 0, Ending::Exit, "", &mut name).unwrap();
    assert!(name.0.ends_with(" formulas=3"), "{}", name.0);
    encoder.restore_row(&Row { name: "'=2", ..Row::default() });
    encoder.end(9, 0, Ending::Killed, "", &mut name).unwrap();
    assert!(!name.0.contains("formulas"), "{}", name.0);
}

#[test]
fn an_encoder_that_resumes_after_any_row_writes_the_same_rows() {
    let event = |address, bytes, allocated, deferred| {
        let block =
            Block { address, bytes, allocated, reserved: 0, requested: -1, pool: 0, deferred, form: 0 };
        Payload::Block(block).pack(header(Api::CachingAllocator, 0, 0))
    };
    let done = |address| Payload::FreeCompleted { address }.pack(header(Api::CachingAllocator, 0, 0));
    let events = [
        event(4096, 512, 512, false),
        event(8192, 1024, 1536, false),
        event(12288, 2048, 3584, false),
        // The first block waits for a stream. Meanwhile the second is freed at once, and its address reused.
        event(4096, -512, 3072, true),
        event(8192, -1024, 2048, false),
        event(8192, 1024, 3072, false),
        event(12288, -2048, 1024, true),
        done(12288),
        // The report that the first block is complete was lost: the reuse of its address shows it.
        event(4096, 512, 1536, false),
        event(8192, -1024, 512, false),
        event(4096, -512, 0, true),
        done(4096),
    ];
    let written = |encoder: &mut Encoder, events: &[Event]| {
        let mut lines = Lines::default();
        for event in events {
            encoder.encode(1, event, &mut lines).unwrap();
        }
        lines.0
    };
    let whole = written(&mut encoder(), &events);
    assert_eq!(whole.len(), events.len());
    for count in 0..events.len() {
        let mut resumed = encoder();
        written(&mut encoder(), &events[..count]).iter().for_each(|line| line.restore(&mut resumed));
        assert_eq!(written(&mut resumed, &events[count..]), whole[count..], "after {count} rows");
    }
}

/// A sink that keeps the columns from which [`Encoder::restore_row`] learns, and those that it sets.
#[derive(Default)]
struct Lines(Vec<Line>);

#[derive(Debug, PartialEq)]
struct Line {
    event: EventName,
    numbers: [i64; 6],
    totals: [i64; 3],
}

impl Line {
    fn restore(&self, encoder: &mut Encoder) {
        let [seq, alloc_id, addr, requested_bytes, rounded_bytes, delta_bytes] = self.numbers;
        let [allocated_bytes, active_bytes, reserved_bytes] = self.totals;
        encoder.restore_row(&Row {
            seq,
            device: 0,
            event: self.event,
            api: Api::CachingAllocator.as_str(),
            alloc_id,
            addr,
            requested_bytes,
            rounded_bytes,
            delta_bytes,
            allocated_bytes,
            active_bytes,
            reserved_bytes,
            ..Row::default()
        });
    }
}

impl RowSink for Lines {
    type Error = std::convert::Infallible;
    fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error> {
        self.0.push(Line {
            event: row.event,
            numbers: [
                row.seq,
                row.alloc_id,
                row.addr,
                row.requested_bytes,
                row.rounded_bytes,
                row.delta_bytes,
            ],
            totals: [row.allocated_bytes, row.active_bytes, row.reserved_bytes],
        });
        Ok(())
    }
}

#[test]
fn each_call_of_virtual_memory_is_counted_once() {
    const PIECE: i64 = 2 << 20;
    let piece = |number: u64| (64 << 20) + number * PIECE as u64;
    let alloc = |api, address, handle| {
        let alloc = AllocCall { call: call(address, PIECE, 0), requested: PIECE, handle };
        Payload::DeviceAlloc(alloc).pack(header(api, 0, 0))
    };
    let free = |api, address, bytes| Payload::DeviceFree(call(address, bytes, 0)).pack(header(api, 0, 0));
    let events = [
        alloc(Api::CuMemCreate, 1, 0),
        alloc(Api::CuMemCreate, 2, 0),
        alloc(Api::CuMemMap, piece(0), 1),
        alloc(Api::CuMemMap, piece(1), 2),
        // The mapping keeps the memory, so this call frees nothing.
        free(Api::CuMemRelease, 1, 0),
        free(Api::CuMemUnmap, piece(0), 2 * PIECE),
        free(Api::CuMemRelease, 2, 0),
    ];
    let mut encoder = encoder();
    let rows = run(&mut encoder, &events).0;
    assert_eq!(rows.iter().filter(|row| row.1 == EventName::SegmentUnmap).count(), 2, "{rows:?}");
    let lines = encoder.statistics().lines();
    for (api, calls) in [("cuMemUnmap", "1 call,"), ("cuMemRelease", "2 calls,")] {
        assert!(lines.iter().any(|line| line.starts_with(&format!("{api}: {calls}"))), "{lines:?}");
    }
}
