//! Tests with small, wrong and hostile snapshots.

use std::path::Path;

use super::model::Model;
use super::{Snapshot, rows};
use crate::testing::pickled::{Fields, Pickled, block, dict, event, frame, int, list, segment, text, with};

fn file(segments: &[Fields], events: &[Fields]) -> Vec<u8> {
    let all = |fields: &[Fields]| list(&fields.iter().map(dict).collect::<Vec<_>>());
    whole(&dict(&vec![("segments", all(segments)), ("device_traces", list(&[all(events)]))]))
}

fn whole(body: &[u8]) -> Vec<u8> {
    [&[0x80, 4], body, b"."].concat()
}

/// Returns the rows of a snapshot, without their header, as columns.
fn rows_of(file: &[u8]) -> Result<Vec<Vec<String>>, String> {
    let model = Model::read(file)?;
    let snapshot = Snapshot::new(model, Path::new("x.pickle"));
    let mut csv = Vec::new();
    rows::write(&snapshot, &mut csv).unwrap();
    let mut reader = ::csv::Reader::from_reader(csv.as_slice());
    Ok(reader.records().map(|row| row.unwrap().iter().map(str::to_owned).collect()).collect())
}

/// Returns the event, the address, and the delta, allocated, active and reserved bytes of each row about
/// memory.
fn memory(file: &[u8]) -> Vec<String> {
    let row = |row: &Vec<String>| [6, 11, 14, 15, 16, 17].map(|column| row[column].clone()).join(" ");
    let rows = rows_of(file).unwrap();
    rows[1..rows.len() - 1].iter().map(row).collect()
}

const MIB: i64 = 1 << 20;

#[test]
fn a_free_request_and_its_completion_are_one_row_unless_a_stream_still_uses_the_block() {
    let all = [
        event("segment_alloc", 4096, 2 * MIB, 1),
        event("alloc", 4096, 100, 2),
        event("alloc", 4608, 600, 3),
        event("free_requested", 4096, 100, 4),
        event("free_completed", 4096, 100, 5),
        event("free_requested", 4608, 600, 6),
        event("alloc", 4096, 1, 7),
        event("free_completed", 4608, 600, 8),
    ];
    let segment = segment(
        4096,
        2 * MIB,
        &[block(4096, 512, "active_allocated"), block(4608, 2 * MIB - 512, "inactive")],
    );
    let expected = [
        "segment_alloc 4096 2097152 0 0 2097152",
        "alloc 4096 512 512 512 2097152",
        "alloc 4608 1024 1536 1536 2097152",
        "free 4096 -512 1024 1024 2097152",
        "free 4608 -1024 0 1024 2097152",
        "alloc 4096 512 512 1536 2097152",
        "free_completed 4608 -1024 512 512 2097152",
    ];
    assert_eq!(memory(&file(&[segment], &all)), expected);
}

#[test]
fn a_history_that_begins_in_the_middle_opens_with_what_was_there() {
    let events = [
        event("free_requested", 4096, 100, 4),
        event("free_completed", 4096, 100, 5),
        event("segment_free", 1 << 30, 4 * MIB, 6),
        event("alloc", 4096, 700, 7),
    ];
    let blocks = [
        block(4096, 1024, "active_allocated"),
        block(5120, 512, "active_pending_free"),
        block(5632, 2 * MIB - 1536, "inactive"),
    ];
    let expected = [
        "segment_alloc 4096 2097152 0 0 2097152",
        "segment_alloc 1073741824 4194304 0 0 6291456",
        // The block whose free is pending comes first, and is no part of the allocated memory after it.
        "live 5120 512 512 512 6291456",
        "free 5120 -512 0 512 6291456",
        "live 4096 512 512 1024 6291456",
        "free 4096 -512 0 512 6291456",
        "segment_free 1073741824 -4194304 0 512 2097152",
        "alloc 4096 1024 1024 1536 2097152",
    ];
    assert_eq!(memory(&file(&[segment(4096, 2 * MIB, &blocks)], &events)), expected);
}

/// A segment of 20 MiB gets a block of 18 MiB and a block of 1.5 MiB. The second block takes the remaining 2
/// MiB, because a rest of at most 1 MiB is not split off in the large pool.
#[test]
fn a_block_that_is_not_split_has_the_size_of_the_free_block() {
    let events = [
        event("segment_alloc", 0x10000, 20 * MIB, 1),
        event("alloc", 0x10000, 18 * MIB, 2),
        event("alloc", 0x10000 + 18 * MIB, 3 * MIB / 2, 3),
        event("free_requested", 0x10000 + 18 * MIB, 3 * MIB / 2, 4),
        event("free_completed", 0x10000 + 18 * MIB, 3 * MIB / 2, 4),
        event("free_requested", 0x10000, 18 * MIB, 5),
        event("free_completed", 0x10000, 18 * MIB, 5),
    ];
    let rows = memory(&file(&[segment(0x10000, 20 * MIB, &[block(0x10000, 20 * MIB, "inactive")])], &events));
    assert_eq!(
        rows[1..4].join("; "),
        format!(
            "alloc 65536 {large} {large} {large} {all}; alloc {next} {small} {all} {all} {all}; free {next} -{small} {large} {large} {all}",
            large = 18 * MIB,
            all = 20 * MIB,
            next = 0x10000 + 18 * MIB,
            small = 2 * MIB
        )
    );
}

#[test]
fn a_range_that_is_unmapped_in_part_is_divided() {
    let expandable = |fields: Fields| with(fields, "is_expandable", vec![0x88]);
    let free = |addr: i64| expandable(segment(addr, 2 * MIB, &[block(addr, 2 * MIB, "inactive")]));
    let events = [event("segment_map", 0, 6 * MIB, 1), event("segment_unmap", 2 * MIB, 2 * MIB, 2)];
    let rows = memory(&file(&[free(0), free(4 * MIB)], &events));
    assert_eq!(rows.first().unwrap(), "segment_map 0 6291456 0 0 6291456");
    assert_eq!(rows.last().unwrap(), "segment_unmap 2097152 -2097152 0 0 4194304");
}

#[test]
fn a_history_that_contradicts_the_blocks_ends_with_the_blocks() {
    let blocks = [block(4096, 512, "active_allocated"), block(4608, 2 * MIB - 512, "inactive")];
    let segments = [segment(4096, 2 * MIB, &blocks)];
    for events in [
        vec![event("alloc", 4608, 5000, 1)],
        vec![event("alloc", 4608, 5000, 1), event("alloc", 4608, 9000, 2)],
        vec![event("free_completed", 4096, 100, 1), event("free_completed", 4096, 100, 2)],
        vec![event("segment_alloc", 0, 4 * MIB, 1), event("segment_free", 1024, 3, 2)],
        vec![event("segment_unmap", 4096, MIB, 1)],
        vec![event("segment_alloc", 4096, 1 << 40, 1)],
    ] {
        let rows = memory(&file(&segments, &events));
        let [.., end, lost] = rows.as_slice() else { panic!("{rows:?}") };
        assert!(end.ends_with(" 512 512 2097152") && lost.starts_with("lost "), "{rows:?}");
    }
}

#[test]
fn a_wrong_value_of_any_field_is_refused_or_left_out() {
    let values: [Pickled; 9] = [
        b"N".to_vec(),
        vec![0x88],
        text("x"),
        list(&[]),
        dict(&vec![("a", int(1))]),
        int(-1),
        int(i64::MAX),
        int(i64::MIN),
        b"G\x7f\xf0\0\0\0\0\0\0".to_vec(),
    ];
    let block = || block(4096, 2 * MIB, "active_allocated");
    let one = |segment: Fields, event: Fields| file(&[segment], &[event]);
    let good = one(segment(4096, 2 * MIB, &[block()]), event("alloc", 4096, 2 * MIB, 1));
    assert_eq!(memory(&good).len(), 2);
    let mut refused = 0;
    for value in &values {
        let mut all = Vec::new();
        for action in ["alloc", "free_requested", "free_completed", "segment_map", "segment_free", "oom"] {
            for (key, _) in event(action, 4096, 512, 1) {
                let event = with(event(action, 4096, 512, 1), key, value.clone());
                all.push((key, one(segment(4096, 2 * MIB, &[block()]), event)));
            }
        }
        let event = || event("alloc", 4096, 2 * MIB, 1);
        for (key, _) in segment(4096, 2 * MIB, &[]) {
            let segment = with(segment(4096, 2 * MIB, &[block()]), key, value.clone());
            all.push((key, one(segment, event())));
        }
        for (key, _) in block() {
            let segment = segment(4096, 2 * MIB, &[with(block(), key, value.clone())]);
            all.push((key, one(segment, event())));
        }
        for (key, _) in frame("f", "a.py", 7) {
            let frames = list(&[dict(&with(frame("f", "a.py", 7), key, value.clone()))]);
            all.push((key, one(segment(4096, 2 * MIB, &[block()]), with(event(), "frames", frames))));
        }
        for (key, file) in all {
            match rows_of(&file) {
                Ok(rows) => assert!(rows.len() < 20, "{key}: {rows:?}"),
                Err(why) => {
                    refused += 1;
                    assert!(!why.is_empty() && !why.contains('\n') && why.len() < 200, "{key}: {why}");
                }
            }
        }
    }
    assert!(refused > 200, "{refused}");
}

#[test]
fn segments_and_blocks_that_cannot_be_are_refused() {
    let free = |addr, bytes| block(addr, bytes, "inactive");
    let none = [];
    let refused = |segments: &[Fields], what: &str| {
        let why = rows_of(&file(segments, &none)).unwrap_err();
        assert!(why.contains(what), "{why}");
    };
    refused(&[segment(0, 1024, &[free(0, 512), free(256, 768)])], "overlap");
    refused(&[segment(0, 1024, &[free(0, 512), free(768, 256)])], "gap");
    refused(&[segment(0, 1024, &[free(0, 2048)])], "longer");
    refused(&[segment(0, 1024, &[free(0, 0), free(0, 1024)])], "overlap");
    refused(&[segment(0, 1024, &[free(0, 512)])], "shorter");
    refused(&[segment(0, 1024, &[])], "shorter");
    refused(&[segment(0, 1024, &[free(0, 1024)]), segment(512, 1024, &[free(512, 1024)])], "overlap");
    refused(&[segment(0, 1024, &[free(0, 1024)]), segment(0, 1024, &[free(0, 1024)])], "overlap");
    refused(&[with(segment(0, 1024, &[free(0, 1024)]), "blocks", list(&[int(1)]))], "a block has no state");
    let unknown = block(0, 1024, "haunted");
    refused(&[segment(0, 1024, &[unknown])], "unknown state");
}

#[test]
fn a_segment_whose_totals_differ_from_its_blocks_is_noted() {
    let blocks = [block(0, 512, "active_allocated"), block(512, 512, "active_pending_free")];
    let meta = |allocated: i64, active: i64| {
        let sums = with(segment(0, 1024, &blocks), "allocated_size", int(allocated));
        let model = Model::read(file(&[with(sums, "active_size", int(active))], &[]).as_slice()).unwrap();
        Snapshot::new(model, Path::new("x.pickle")).meta
    };
    let note = "1 segment has totals that differ from the sum of their blocks";
    let is_noted =
        |allocated, active| meta(allocated, active).degraded.iter().any(|text| text.contains(note));
    assert!(!is_noted(512, 1024));
    assert!(is_noted(1024, 1024));
    assert!(is_noted(512, 512));
}

#[test]
fn an_event_of_an_unknown_kind_is_left_out_and_noted() {
    let unknown = vec![("action", text("user_defined")), ("name", text("forward"))];
    let events = [event("segment_alloc", 0, 1024, 1), unknown, event("alloc", 0, 512, 2)];
    let blocks = [block(0, 512, "active_allocated"), block(512, 512, "inactive")];
    let model = Model::read(file(&[segment(0, 1024, &blocks)], &events).as_slice()).unwrap();
    let notes = Snapshot::new(model, Path::new("x.pickle")).meta.degraded;
    let note = "1 event of a kind that this version of memtrace does not know, left out";
    assert!(notes.iter().any(|text| text.ends_with(note)), "{notes:?}");
}

#[test]
fn a_frame_whose_line_is_the_largest_number_has_no_line() {
    // PyTorch writes 2^64 - 1 for the line of some frames.
    let largest = [&[0x8A, 9][..], &[0xFF; 8], &[0]].concat();
    let unknown = dict(&with(frame("f", "a.py", 7), "line", largest.clone()));
    let alloc = with(event("alloc", 4096, 2 * MIB, 1), "frames", list(&[unknown]));
    let segments = [segment(4096, 2 * MIB, &[block(4096, 2 * MIB, "active_allocated")])];
    let model = Model::read(file(&segments, &[alloc]).as_slice()).unwrap();
    let stacks = String::from_utf8(model.owners.stacks_file().unwrap()).unwrap();
    assert!(stacks.contains("a.py:0 f"), "{stacks}");
    let why = rows_of(&file(&segments, &[with(event("alloc", 0, 1, 1), "addr", largest)])).unwrap_err();
    assert!(why.contains("\"addr\" is not a number"), "{why}");
}

#[test]
fn a_block_whose_free_is_pending_when_the_history_begins_comes_before_live_blocks() {
    let blocks = [block(4096, 512, "active_allocated"), block(4608, 2 * MIB - 512, "inactive")];
    let events = [event("free_completed", 4608, 512, 1)];
    let rows = memory(&file(&[segment(4096, 2 * MIB, &blocks)], &events));
    let wanted = [
        "segment_alloc 4096 2097152 0 0 2097152",
        "live 4608 512 512 512 2097152",
        "free 4608 -512 0 512 2097152",
        "live 4096 512 512 1024 2097152",
        "free_completed 4608 -512 512 512 2097152",
    ];
    assert_eq!(rows, wanted);
}

#[test]
fn a_list_of_segments_alone_is_a_snapshot_without_history() {
    let blocks = [block(4096, 2 * MIB, "active_allocated")];
    let rows = rows_of(&whole(&list(&[dict(&segment(4096, 2 * MIB, &blocks))]))).unwrap();
    assert_eq!(rows[2][6], "live");
    for wrong in [list(&[]), list(&[int(1)]), list(&[dict(&blocks[0])])] {
        assert!(rows_of(&whole(&wrong)).is_err());
    }
}

#[test]
fn values_that_are_listed_twice_are_refused() {
    // Returns a pickled list with a dict and a reference to the same dict (entry 0 of the memo).
    let again = |one: &Fields| {
        [b"](".to_vec(), b"}\x94(".to_vec(), dict(one)[2..].to_vec(), b"h\0e".to_vec()].concat()
    };
    let free = block(0, 1024, "inactive");
    let top = |segments: Pickled, traces: Pickled| {
        rows_of(&whole(&dict(&vec![("segments", segments), ("device_traces", traces)])))
    };
    assert!(top(again(&segment(0, 1024, std::slice::from_ref(&free))), list(&[])).is_err());
    assert!(top(list(&[]), list(&[again(&event("alloc", 0, 1, 1))])).is_err());
    let blocks = with(segment(0, 2048, &[]), "blocks", again(&free));
    assert!(top(list(&[dict(&blocks)]), list(&[])).is_err());
    // The histories of both devices are the same list: an error.
    let events = [b"]\x94(".to_vec(), dict(&event("alloc", 0, 1, 1)), b"e".to_vec()].concat();
    let twice = [b"](".to_vec(), events, b"h\0e".to_vec()].concat();
    assert!(top(list(&[]), twice).unwrap_err().contains("twice"));
    // A list that contains itself, and a dict that contains itself: errors.
    assert!(top(b"]\x94h\0a".to_vec(), list(&[])).is_err());
    assert!(top(list(&[b"}\x94(\x8c\x01ah\0u".to_vec()]), list(&[])).is_err());
}

#[test]
fn opcodes_that_a_snapshot_does_not_have_are_refused() {
    let mut bodies: Vec<Vec<u8>> = vec![
        b"cos\nsystem\n".to_vec(),
        b"\x8c\x02os\x8c\x06system\x93".to_vec(),
        b"(ios\nsystem\n".to_vec(),
        b")R".to_vec(),
        b"(o".to_vec(),
        b"}}b".to_vec(),
        b")\x81".to_vec(),
        b"))}\x92".to_vec(),
        b"Pid\n".to_vec(),
        b"NQ".to_vec(),
        b"\x82\x01".to_vec(),
        b"\x97".to_vec(),
        b"\x98".to_vec(),
        b"".to_vec(),
        b"0".to_vec(),
        b"N0".to_vec(),
        b"e".to_vec(),
        b"(e".to_vec(),
        b"N(e".to_vec(),
        b"}(e".to_vec(),
        b"N(u".to_vec(),
        b"](u".to_vec(),
        b"}(Nu".to_vec(),
        b"}(NNNu".to_vec(),
        b"}Ns".to_vec(),
        b"Na".to_vec(),
        b"a".to_vec(),
        b"s".to_vec(),
        b"u".to_vec(),
        b"t".to_vec(),
        b"\x85".to_vec(),
        b"N\x86".to_vec(),
        b"N(\x85".to_vec(),
        b"h\0".to_vec(),
        b"j\0\0\0\x7f".to_vec(),
        b"\x94".to_vec(),
        b"Nq\x07".to_vec(),
        b"Nr\xff\xff\xff\x7f".to_vec(),
        b"K\x01\x94".to_vec(),
        b"\x8a\xff".to_vec(),
        [&b"\x8a\x09"[..], &[0xFF; 9]].concat(),
        [&b"\x8a\xff"[..], &[0x7F; 255]].concat(),
        b"\x8b\xff\xff\xff\x7f".to_vec(),
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\x7f".to_vec(),
        b"\x8c\xff\xff".to_vec(),
        b"X\xff\xff\xff\xff".to_vec(),
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff".to_vec(),
        b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f".to_vec(),
        b"NN".to_vec(),
        b"(N".to_vec(),
        b"N".to_vec(),
        b"]".to_vec(),
        b"}".to_vec(),
        b"K\x01".to_vec(),
        b"(".repeat(1000),
        b"](".repeat(1000),
        b"N".repeat(1 << 17),
    ];
    bodies.extend((0..=255_u8).filter(|byte| *byte != b'.').map(|byte| vec![byte]));
    for body in bodies {
        let why = rows_of(&whole(&body)).unwrap_err();
        assert!(!why.is_empty() && !why.contains('\n') && why.len() < 200, "{body:?}: {why}");
    }
}

#[test]
fn a_file_that_is_cut_off_anywhere_is_refused() {
    let blocks = [block(4096, 2 * MIB, "active_allocated")];
    let whole = file(&[segment(4096, 2 * MIB, &blocks)], &[event("alloc", 4096, 2 * MIB, 1)]);
    for length in 0..whole.len() {
        assert!(rows_of(&whole[..length]).is_err(), "{length}");
    }
    // Each changed byte causes an error or a few rows, but no panic.
    for place in 0..whole.len() {
        for change in [1, 0x80, 0xFF] {
            let mut changed = whole.clone();
            changed[place] ^= change;
            if let Ok(rows) = rows_of(&changed) {
                assert!(rows.len() < 20, "{place}");
            }
        }
    }
}
