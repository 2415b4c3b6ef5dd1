use std::path::PathBuf;

use memtrace_trace::Row;
use memtrace_trace::{Category, EventName};

use super::{Action, Profile, ProfilerCategory, Raw};
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::testing::TraceBuilder;

const KIB: i64 = 1024;

fn profile_of(trace: TraceBuilder, name: &str) -> Profile {
    let folder: PathBuf =
        std::env::temp_dir().join(format!("memtrace-profile-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let path = folder.join("a.csv");
    std::fs::write(&path, trace.finish()).unwrap();
    let profile = Profile::read(&TraceFile::open(&path).unwrap(), &Options::default()).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    profile
}

/// Returns the actions on device 0: action, block, version, and the category before and after the action.
fn actions(profile: &Profile) -> Vec<(Action, u32, u32, ProfilerCategory, ProfilerCategory)> {
    profile
        .actions(0)
        .map(|change| (change.action, change.block, change.version, change.category, change.after))
        .collect()
}

/// Writes the row of an op whose duration is `rows` rows of 1 µs each.
fn op(trace: &mut TraceBuilder, name: &str, api: &str, rows: i64) {
    trace.raw(Row {
        event: EventName::Op,
        device: 0,
        op: name,
        api,
        latency_ns: rows * 1000,
        ..Row::default()
    });
}

fn io(trace: &mut TraceBuilder, api: &str, block: i64) {
    trace.raw(Row { event: EventName::Io, device: 0, api, alloc_id: block, ..Row::default() });
}

#[test]
fn a_profile_without_io_records_has_the_category_of_each_blocks_last_row() {
    let mut trace = TraceBuilder::default();
    let none = Row::default();
    let weight = trace.alloc(4 * KIB, none);
    trace.tag(weight, 4 * KIB, none, Row { category: Category::Parameter, ..none });
    let activation = Row { category: Category::Activation, ..none };
    let block = trace.alloc(KIB, activation);
    trace.free(block, KIB, activation);
    let profile = profile_of(trace, "plain");
    assert!(!profile.has_io);
    assert_eq!(
        actions(&profile),
        [
            (Action::Create, 0, 0, ProfilerCategory::Parameter, ProfilerCategory::Parameter),
            (Action::Create, 1, 0, ProfilerCategory::Activation, ProfilerCategory::Activation),
            (Action::Destroy, 1, 0, ProfilerCategory::Activation, ProfilerCategory::Activation),
        ]
    );
    let timeline: Vec<(i64, [i64; 9])> = profile.timeline(0).collect();
    assert_eq!(timeline[1].1, [0, 4 * KIB, 0, 0, 0, KIB, 0, 0, 0]);
    assert_eq!(timeline[2].1, [0, 4 * KIB, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(profile.raw(0).nth(2).unwrap().1, 4);
}

#[test]
fn a_block_with_a_free_alone_is_preexisting() {
    let mut trace = TraceBuilder::default();
    trace.free(7, 2 * KIB, Row::default());
    let profile = profile_of(trace, "before");
    let raw: Vec<Raw> = profile.raw(0).collect();
    assert_eq!((raw[0].0, raw[0].1, raw[0].2), (-1, 1, 2 * KIB));
    assert_eq!((raw[1].1, raw[1].2), (4, -2 * KIB));
    // The preexisting block has a separate row, at the time of the first action.
    let timeline: Vec<(i64, [i64; 9])> = profile.timeline(0).collect();
    assert_eq!(timeline[0].0, timeline[1].0);
    assert_eq!([timeline[0].1, timeline[1].1], [[0, 0, 0, 0, 0, 0, 0, 0, 2 * KIB], [0; 9]]);
}

#[test]
fn a_block_of_a_brief_step_is_created_at_its_row_and_not_preexisting() {
    let mut trace = TraceBuilder::default();
    let live = |trace: &mut TraceBuilder, alloc_id: i64| {
        let row = Row { event: EventName::Live, device: 0, alloc_id, delta_bytes: KIB, ..Row::default() };
        trace.change(row, [KIB, KIB, 0])
    };
    // An opening row, then an allocation, then a row that a block of a brief step gets late.
    live(&mut trace, 100);
    trace.alloc(2 * KIB, Row::default());
    let late = live(&mut trace, 101);
    let profile = profile_of(trace, "brief");
    let born: Vec<Option<i64>> = profile.blocks.iter().map(|block| block.born_ns).collect();
    assert_eq!(born, [None, Some(2000), Some((late - 1) * 1000)]);
    let first = [Action::Preexisting, Action::Create, Action::Create];
    assert_eq!(actions(&profile).iter().map(|action| action.0).collect::<Vec<_>>(), first);
}

/// Uses the rows of one step of SGD on `y = relu(x * w)`, without tags.
#[test]
fn the_profile_passes_distinguish_parameters_inputs_activations_and_gradients() {
    let mut trace = TraceBuilder::default();
    let none = Row::default();
    let w = trace.alloc(64 * KIB, none);
    let x = trace.alloc(KIB, none);
    // y = x * w, then relu in place.
    io(&mut trace, "read", x);
    io(&mut trace, "read", w);
    let y = trace.alloc(2 * KIB, none);
    let scratch = trace.alloc(9 * KIB, none);
    trace.free(scratch, 9 * KIB, none);
    op(&mut trace, "aten::mm", "operator", 5);
    io(&mut trace, "read_write", y);
    op(&mut trace, "aten::relu_", "operator", 1);
    io(&mut trace, "read", y);
    let dy = trace.alloc(2 * KIB, none);
    op(&mut trace, "ReluBackward0", "backward_function", 2);
    io(&mut trace, "given", dy);
    io(&mut trace, "read", dy);
    io(&mut trace, "read", x);
    let dw = trace.alloc(64 * KIB, none);
    op(&mut trace, "MmBackward0", "backward_function", 4);
    io(&mut trace, "given", dw);
    io(&mut trace, "read", dw);
    op(&mut trace, "torch::autograd::AccumulateGrad", "backward_function", 2);
    io(&mut trace, "read_write", w);
    io(&mut trace, "read", dw);
    op(&mut trace, "aten::add_", "operator", 2);
    trace.free(y, 2 * KIB, none);
    let profile = profile_of(trace, "passes");
    assert!(profile.has_io && !profile.has_tags);
    let category = |id: i64, action: Action| {
        let found = profile.actions(0).find(|c| profile.block(c).id == id && c.action == action).unwrap();
        (found.category, found.after)
    };
    use Action::{Create, Destroy, IncrementVersion};
    assert_eq!(category(w, Create).0, ProfilerCategory::Parameter);
    assert_eq!(category(w, IncrementVersion), (ProfilerCategory::Parameter, ProfilerCategory::Parameter));
    assert_eq!(category(x, Create).0, ProfilerCategory::Input);
    assert_eq!(category(y, Create).0, ProfilerCategory::Activation);
    assert_eq!(category(y, IncrementVersion), (ProfilerCategory::Activation, ProfilerCategory::Activation));
    assert_eq!(category(y, Destroy).0, ProfilerCategory::Activation);
    assert_eq!(category(scratch, Create).0, ProfilerCategory::Temporary);
    assert_eq!(category(dw, Create).0, ProfilerCategory::Gradient);
    assert_eq!(category(dy, Create).0, ProfilerCategory::AutogradDetail);
    assert!(profile.actions(0).all(|change| change.inferred));
    let increments = profile.actions(0).filter(|change| change.action == IncrementVersion).count();
    assert_eq!(increments, 2);
}
