//! Makes hostile memory snapshots.

use memtrace_analysis::testing::pickled::{
    Fields, Pickled, block, dict, event, frame, int, list, segment, text, with,
};

/// One kind of hostile snapshot.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) bytes: Vec<u8>,
}

const MIB: i64 = 1 << 20;
/// The largest number that a snapshot may have.
const MOST: i64 = (1 << 62) - 1;
const CONTROL: &str = "\u{1b}[2J\u{1b}]0;owned\u{7}\n\r\0\u{202E}</script><img src=x onerror=alert(1)>,\"'";

fn framed(name: &str, file: &str, line: i64) -> Pickled {
    dict(&frame(name, file, line))
}

/// Returns a segment with one block of its size.
fn full(addr: i64, bytes: i64) -> Fields {
    segment(addr, bytes, &[block(addr, bytes, "active_allocated")])
}

fn all(of: &[Fields]) -> Pickled {
    list(&of.iter().map(dict).collect::<Vec<_>>())
}

fn top(segments: &[Fields], events: &[Fields]) -> Fields {
    vec![("segments", all(segments)), ("device_traces", list(&[all(events)]))]
}

fn file(segments: &[Fields], events: &[Fields]) -> Vec<u8> {
    whole(&dict(&top(segments, events)))
}

fn whole(body: &[u8]) -> Vec<u8> {
    [&[0x80, 4], body, b"."].concat()
}

/// Returns a snapshot whose only event has this value in place of its stack.
fn in_stack(value: &[u8]) -> Vec<u8> {
    file(&[], &[with(event("alloc", 0, 512, 1), "frames", value.to_vec())])
}

/// Returns the snapshots that must be refused. A kind that could run code would make the file `proof`.
pub(crate) fn broken(proof: &str) -> Vec<Kind> {
    let touch = format!("Vtouch {proof}\n");
    let call = |start: &str, end: &str| whole([start, &touch, end].concat().as_bytes());
    let raw = |bytes: &[u8]| whole(bytes);
    let bad_event = |key, value: Pickled| file(&[], &[with(event("alloc", MIB, 512, 1), key, value)]);
    let bad_segment = |key, value: Pickled| file(&[with(full(MIB, MIB), key, value)], &[]);
    let bad_block = |key, value: Pickled| {
        let block = with(block(MIB, MIB, "active_allocated"), key, value);
        file(&[segment(MIB, MIB, &[block])], &[])
    };
    let two = |bytes: &[u8]| dict(&vec![("segments", bytes.to_vec()), ("device_traces", list(&[]))]);
    let segment_twice = [b"](".to_vec(), dict(&full(0, MIB)), b"q\x00h\x00e".to_vec()].concat();
    let event_twice = [b"](".to_vec(), dict(&event("alloc", 0, 512, 1)), b"q\x00h\x00e".to_vec()].concat();
    let bomb = |make: &[u8], refer: &[u8]| {
        // Each list has the preceding list ten times.
        let level =
            |at: u8| [make, &b"("[..], &[refer, &[at - 1]].concat().repeat(10), b"e", &[b'q', at]].concat();
        [b"]q\x00".to_vec(), (1..60).flat_map(level).collect()].concat()
    };
    let kind = |name, bytes| Kind { name, bytes };
    let mut kinds = vec![
        // Opcodes that load or run code.
        kind("os.system by REDUCE", call("cos\nsystem\n(", "tR")),
        kind("builtins.exec by REDUCE", call("cbuiltins\nexec\n(", "tR")),
        kind("builtins.getattr", call("cbuiltins\ngetattr\n(", "tR")),
        kind("subprocess.Popen by INST", call("(", "isubprocess\nPopen\n")),
        kind("OBJ", call("(cos\nsystem\n", "o")),
        kind(
            "STACK_GLOBAL",
            raw(&[&text("posix")[..], &text("system"), &[0x93], &text(&touch), b"\x85R"].concat()),
        ),
        kind("REDUCE of a text", raw(&[&text("os.system")[..], b")R"].concat())),
        kind("BUILD of a dict", raw(b"}}b")),
        kind("NEWOBJ", raw(b"})\x81")),
        kind("NEWOBJ_EX", raw(b"})}\x92")),
        kind("persistent id in text", raw(b"Pstorage\n")),
        kind("persistent id", raw(b"NQ")),
        kind("extension 1", raw(b"\x82\x01")),
        kind("extension 2", raw(b"\x83\x01\x00")),
        kind("extension 4", raw(b"\x84\x01\x00\x00\x00")),
        kind("code in a stack", in_stack(call("cos\nsystem\n(", "tR").strip_prefix(&[0x80, 4]).unwrap())),
        kind(
            "code after a snapshot in the same dict",
            raw(&[&b"}("[..], &text("segments"), b"cos\nsystem\nu"].concat()),
        ),
        kind("code in a key", raw(&[&b"}("[..], b"cos\nsystem\n", b"Nu"].concat())),
        // Opcodes that no snapshot has.
        kind("POP", raw(b"NN0")),
        kind("POP_MARK", raw(b"N(1")),
        kind("DUP", raw(b"N2")),
        kind("set", raw(b"\x8f")),
        kind("frozenset", raw(b"(\x91")),
        kind("bytearray of 2^60 bytes", raw(&[&[0x96][..], &(1_u64 << 60).to_le_bytes()].concat())),
        kind("buffer outside the file", raw(b"\x97")),
        kind("read-only buffer", raw(b"\x98")),
        kind("short bytes", raw(b"C\x01a")),
        kind("bytes of 2^32 bytes", raw(b"B\xff\xff\xff\xff")),
        kind("bytes of 2^60 bytes", raw(&[&[0x8E][..], &(1_u64 << 60).to_le_bytes()].concat())),
        kind("decimal number of 8 MiB", raw(&[&b"L"[..], &b"9".repeat(8 << 20), b"L\n"].concat())),
        kind("decimal int", raw(b"I1\n")),
        kind("decimal float", raw(b"F1\n")),
        kind("decimal text", raw(b"S'a'\n")),
        kind("memo by text", raw(b"Np0\n")),
        kind("unassigned opcode", raw(b"\xff")),
        // Lengths that lie.
        kind("text of 2^60 bytes", raw(&[&[0x8D][..], &(1_u64 << 60).to_le_bytes()].concat())),
        kind("text of 2^64 bytes", raw(&[&[0x8D][..], &u64::MAX.to_le_bytes()].concat())),
        kind("text of 2^32 bytes", raw(b"X\xff\xff\xff\xff")),
        kind("text longer than the file", raw(b"\x8c\xffabc")),
        kind("text of 2 MiB", raw(&text(&"a".repeat(2 << 20)))),
        kind("number of 2^31 bytes", raw(b"\x8b\xff\xff\xff\x7f")),
        kind("number of 255 bytes", raw(&[&[0x8A, 255][..], &[1; 255]].concat())),
        kind("number of 9 bytes", raw(&[&[0x8A, 9][..], &[1; 9]].concat())),
        kind("frame of 2^60 bytes", raw(&[&[0x95][..], &(1_u64 << 60).to_le_bytes()].concat())),
        kind("cut off after its header", vec![0x80, 4]),
        kind("cut off in an event", in_stack(&list(&[]))[..60].to_vec()),
        kind(
            "100 MiB of texts",
            raw(&(0..100_000)
                .flat_map(|at| [&text(&format!("{at:01000}"))[..], b"0"].concat())
                .collect::<Vec<u8>>()[..]),
        ),
        kind(
            "100 MiB of texts in lists",
            raw(&[
                &b"]"[..],
                &(0..100_000)
                    .flat_map(|at| [&text(&format!("{at:01000}"))[..], b"a"].concat())
                    .collect::<Vec<u8>>(),
            ]
            .concat()),
        ),
        // The memo.
        kind("memo bomb", raw(&[&b"N"[..], &[0x94].repeat(20 << 20)].concat())),
        kind("memo entry 2^32", raw(b"Nr\xff\xff\xff\xff")),
        kind("memo entry 255", raw(b"Nq\xff")),
        kind("memo entry that does not exist", raw(b"h\x07")),
        kind("large memo entry that does not exist", raw(b"j\xff\xff\xff\xff")),
        kind("memo of a number", raw(b"K\x01\x94")),
        kind("memo without a value", raw(b"\x94")),
        kind("10^59 lists by reference", raw(&[&two(&bomb(b"]", b"h"))[..]].concat())),
        // Recursion and depth.
        kind("lists without end", raw(&b"]".repeat(20 << 20))),
        kind("dicts without end", raw(&b"}".repeat(20 << 20))),
        kind("tuples in tuples", raw(&[&b"N"[..], &b"\x85".repeat(20 << 20)].concat())),
        kind("empty tuples without end", raw(&b")".repeat(20 << 20))),
        kind("marks without end", raw(&b"(".repeat(1 << 20))),
        kind("lists in a list", raw(&[&b"]("[..], &b"]".repeat(60_000), b"e"].concat().repeat(100))),
        kind("empty lists in a list", raw(&[&b"]"[..], &b"]a".repeat(10 << 20)].concat())),
        kind("numbers in a list", raw(&[&b"]"[..], &b"K\x01a".repeat(1 << 20)].concat())),
        kind("a list in itself", raw(b"]q\x00h\x00a")),
        kind("a list in itself as segments", raw(&two(b"]q\x00h\x00a"))),
        kind("a dict in itself", raw(&[&b"}q\x00"[..], &text("segments"), b"h\x00s"].concat())),
        kind("a stack in itself", in_stack(b"]q\x00h\x00a")),
        kind("a stack of 100,000 frames", in_stack(&list(&vec![framed("f", "a.py", 1); 100_000]))),
        // Opcodes without their values.
        kind("STOP without a value", raw(b"")),
        kind("STOP inside a list", raw(b"](N")),
        kind("two values at the end", raw(b"NN")),
        kind("APPEND without a list", raw(b"Na")),
        kind("APPENDS without a mark", raw(b"]e")),
        kind("APPEND to a number", raw(b"K\x01Na")),
        kind("SETITEM without a dict", raw(b"NNs")),
        kind("SETITEM of a list", raw(b"]NNs")),
        kind("SETITEMS without a mark", raw(b"}u")),
        kind("a key without a value", raw(b"}(Nu")),
        kind("TUPLE without a mark", raw(b"Nt")),
        kind("TUPLE3 of two values", raw(b"NN\x87")),
        // The form of a snapshot.
        kind("a number", raw(b"K\x01")),
        kind("a list", raw(b"]")),
        kind("an empty dict", raw(b"}")),
        kind("no histories", raw(&dict(&vec![("segments", list(&[]))]))),
        kind("segments that are a number", raw(&two(b"K\x01"))),
        kind(
            "200 devices",
            raw(&dict(&vec![("segments", list(&[])), ("device_traces", list(&vec![list(&[]); 200]))])),
        ),
        kind("a segment twice", raw(&two(&segment_twice))),
        kind(
            "an event twice",
            raw(&dict(&vec![("segments", list(&[])), ("device_traces", list(&[event_twice]))])),
        ),
        kind("an action that is a list", bad_event("action", list(&[]))),
        kind("an event of -1 bytes", bad_event("size", int(-1))),
        kind("an event of 2^63 bytes", bad_event("size", int(i64::MAX))),
        kind("an address below 0", bad_event("addr", int(i64::MIN))),
        kind("a time of 2^63", bad_event("time_us", int(i64::MAX))),
        kind("a stack that is a text", bad_event("frames", text("f"))),
        kind("a frame that is an event", bad_event("frames", list(&[dict(&event("alloc", 0, 1, 1))]))),
        kind("a segment of 2^63 bytes", bad_segment("total_size", int(i64::MAX))),
        kind("a segment on device 2^40", bad_segment("device", int(1 << 40))),
        kind("a segment on device -1", bad_segment("device", int(-1))),
        kind("a segment whose blocks are a text", bad_segment("blocks", text("b"))),
        kind("a segment larger than its blocks", bad_segment("total_size", int(2 * MIB))),
        kind("a segment smaller than its blocks", bad_segment("total_size", int(512))),
        kind("a block of an unknown state", bad_block("state", text("free"))),
        kind("a block of 0 bytes", bad_block("size", int(0))),
        kind("a block at another address", bad_block("address", int(7))),
        kind("a block of 2^63 bytes", bad_block("size", int(i64::MAX))),
    ];
    let keys = [event("alloc", MIB, 512, 1), vec![("size", int(1)); 70]].concat();
    kinds.push(kind("an event of 76 keys", file(&[], &[keys])));
    let segments = [full(MIB, 2 * MIB), full(2 * MIB, MIB)];
    kinds.push(kind("segments that overlap", file(&segments, &[])));
    kinds
}

/// Returns the hostile snapshots that have the form of a snapshot.
pub(crate) fn readable() -> Vec<Kind> {
    let kind = |name, bytes| Kind { name, bytes };
    let events = |count: i64, of: &dyn Fn(i64) -> Fields| (0..count).map(of).collect::<Vec<_>>();
    let stack = |frames: &[Pickled]| with(event("alloc", MIB, 512, 1), "frames", list(frames));
    let call = |at| framed("_call_impl", "/x/torch/nn/modules/module.py", at);
    let annotation = |at: i64, stage: Pickled| {
        dict(&vec![
            ("stage", stage),
            ("name", text("Optimizer.step#Adam.step")),
            ("device", int(0)),
            ("time_us", int(at)),
        ])
    };
    let annotations = |all: &[Pickled]| {
        whole(&dict(&with(top(&[], &[event("alloc", MIB, 512, 1)]), "external_annotations", list(all))))
    };
    let settings = |conf: &str, max_split: Pickled| {
        let settings = dict(&vec![("PYTORCH_CUDA_ALLOC_CONF", text(conf)), ("max_split_size", max_split)]);
        let events = events(100, &|at| event("alloc", at * 3 * MIB, 2 * MIB + 1, at));
        whole(&dict(&with(top(&[full(0, MIB)], &events), "allocator_settings", settings)))
    };
    let mut many_keys: Fields = vec![("size", int(1)); 50];
    many_keys.extend(event("alloc", MIB, 512, 1));
    let pools =
        |at: i64| with(full(at * MIB, MIB), "segment_pool_id", [int(at + 1), int(0), vec![0x86]].concat());
    let forward = |at: i64| [call(at), framed("forward", &format!("/x/{at}{}.py", "n".repeat(200)), at)];
    let by_device: Vec<Pickled> = (0..127)
        .map(|device| all(&events(500, &|at| event("alloc", at * 512, 512, (at * 7 + device) % 97))))
        .collect();
    vec![
        kind("nothing", file(&[], &[])),
        kind("10 MiB after its end", [file(&[], &[]), vec![b'('; 10 << 20]].concat()),
        kind(
            "control characters and markup",
            file(&[], &[stack(&[framed(CONTROL, &format!("{CONTROL}.py"), -1)])]),
        ),
        kind(
            "texts that are not UTF-8",
            in_stack(
                &[
                    b"](",
                    &dict(&vec![
                        ("name", b"\x8c\x02\xff\xfe".to_vec()),
                        ("filename", text("a.py")),
                        ("line", int(i64::MIN)),
                    ])[..],
                    b"e",
                ]
                .concat(),
            ),
        ),
        kind("a name of 1 MiB", file(&[], &[stack(&[framed(&"n".repeat(1 << 20), "a.py", 1)])])),
        kind(
            "an op with a hostile name",
            file(&[], &[stack(&[framed(&format!("at::_ops::{CONTROL}::call(at::Tensor)"), "??", 0)])]),
        ),
        kind(
            "5,000 calls of modules",
            file(
                &[],
                &[stack(
                    &(0..5000)
                        .rev()
                        .flat_map(|at| [framed("forward", "/x/net.py", at), call(at)])
                        .collect::<Vec<_>>()[..1000],
                )],
            ),
        ),
        kind(
            "20,000 modules",
            file(
                &[],
                &events(20_000, &|at| {
                    with(
                        event("alloc", at * 512, 512, at),
                        "frames",
                        list(&[framed("forward", &format!("/x/a{at}.py"), at), call(at)]),
                    )
                }),
            ),
        ),
        kind(
            "paths of 10 MiB",
            file(
                &[],
                &events(2000, &|at| {
                    with(
                        event("alloc", at * 512, 512, at),
                        "frames",
                        list(
                            &forward(at)
                                .iter()
                                .rev()
                                .chain(&forward(1).into_iter().rev().collect::<Vec<_>>())
                                .cloned()
                                .collect::<Vec<_>>(),
                        ),
                    )
                }),
            ),
        ),
        kind("allocations at one address", file(&[], &events(50_000, &|at| event("alloc", MIB, 512, at)))),
        kind(
            "frees of nothing",
            file(&[], &events(50_000, &|at| event("free_completed", at * 512, 512, at))),
        ),
        kind(
            "requests that are never completed",
            file(&[], &events(50_000, &|at| event("free_requested", at * 512, 512, at))),
        ),
        kind("blocks of the largest size", file(&[], &events(5000, &|at| event("alloc", at, 1 << 49, at)))),
        kind(
            "segments of the largest size",
            file(&[], &events(5000, &|at| event("segment_alloc", at, 1 << 49, at))),
        ),
        kind(
            "the largest address",
            file(&[], &[event("segment_alloc", MOST, 512, 1), event("alloc", MOST, 512, 1)]),
        ),
        kind("times that go back", file(&[], &events(1000, &|at| event("alloc", at * 512, 512, 1000 - at)))),
        kind(
            "times far apart",
            file(&[], &[event("alloc", 0, 512, 0), event("alloc", 512, 512, MOST / 1000)]),
        ),
        kind(
            "a range that is unmapped piece by piece",
            file(
                &[],
                &[
                    vec![event("segment_map", 0, 40_000 * MIB, 0)],
                    events(20_000, &|at| event("segment_unmap", at * 2 * MIB, MIB, at)),
                ]
                .concat(),
            ),
        ),
        kind(
            "ranges that are mapped twice",
            file(&[], &events(20_000, &|at| event("segment_map", at * MIB, 64 * MIB, at))),
        ),
        kind(
            "segments freed that never were",
            file(&[], &events(20_000, &|at| event("segment_free", at * MIB, 64 * MIB, at))),
        ),
        kind("an OOM of the largest size", file(&[], &[event("oom", MOST, MOST, 1)])),
        kind("5,000 OOMs", file(&[], &events(5000, &|at| event("oom", 0, 1 << 40, at)))),
        kind(
            "a history against its segments",
            file(
                &[full(0, MIB), full(2 * MIB, 4 * MIB)],
                &events(5000, &|at| {
                    event(
                        ["alloc", "segment_unmap", "free_completed", "segment_alloc"][at as usize % 4],
                        at % 64 * 65_536,
                        200_000,
                        at,
                    )
                }),
            ),
        ),
        kind("10,000 segments", file(&events(10_000, &|at| full(at * MIB, MIB)), &[])),
        kind("10,000 pools", file(&events(10_000, &pools), &[])),
        kind(
            "20,000 blocks in a segment",
            file(
                &[segment(
                    0,
                    20_000 * 512,
                    &events(20_000, &|at| block(at * 512, 512, "active_awaiting_free")),
                )],
                &[],
            ),
        ),
        kind("a segment without blocks", file(&[segment(MIB, 0, &[])], &[])),
        kind("sums that are wrong", file(&[with(full(0, MIB), "allocated_size", int(7))], &[])),
        kind(
            "127 devices",
            whole(&dict(&vec![("segments", list(&[])), ("device_traces", list(&by_device))])),
        ),
        kind("the same key 50 times", file(&[], &[many_keys])),
        kind(
            "10,000 ends of steps",
            annotations(&(0..10_000).map(|at| annotation(at, text("END"))).collect::<Vec<_>>()),
        ),
        kind("annotations that are no dicts", annotations(&[int(1), text("END"), list(&[])])),
        kind("an annotation without a stage", annotations(&[annotation(1, list(&[]))])),
        kind("a step that ends before time", annotations(&[annotation(i64::MIN, text("END"))])),
        kind("settings with control characters", settings(CONTROL, int(-1))),
        kind(
            "settings of 10^18 divisions",
            settings("roundup_power2_divisions:999999999999999999", int(i64::MAX)),
        ),
        kind("settings without end", settings(&"roundup_power2_divisions:[".repeat(10_000), list(&[]))),
    ]
}
