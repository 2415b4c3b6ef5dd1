//! `memtrace serving`: the memory of a model server on each device, over all of its processes.
//!
//! The lines of the ledger are grouped by their use in a server. The sum of the groups is the memory in use.

use std::collections::{BTreeMap, BTreeSet};

use memtrace_trace::server_mark::ServerMark;
use memtrace_trace::text::printable;
use memtrace_trace::{Category, EventName};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::ledger::{CUBLAS, Later, LedgerKind, LedgerLine, LedgerState, NCCL, print_asleep, states_at};
use super::report::{Answer, Report, next};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::read::record::{Columns, Record};
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::{bar, count, counted, percent, share};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::categories::KnownCategories;
use crate::state::moment::{self, NamedMoment};
use crate::state::replay::{Metric, Replay};
use crate::state::replay_trace::{Replayed, replay_trace};

/// `memtrace serving`.
pub(super) struct Serving;

/// The names of the lines, in the order in which they are printed.
const HELD_BY: [&str; 11] = [
    "weights",
    "KV cache",
    "activations and inputs",
    "CUDA graphs",
    "workspaces",
    "other tensors",
    "torch's cache and rounding",
    "NCCL",
    "other libraries",
    "CUDA context",
    "other processes, unexplained",
];
const KV_CACHE: usize = 1;
const GRAPHS: usize = 3;
const WORKSPACES: usize = 4;
const CACHE: usize = 6;
const OTHERS: usize = 10;

/// Returns the index in [`HELD_BY`] of the group to which a line of the ledger belongs.
fn place(line: &LedgerLine) -> usize {
    match &line.kind {
        LedgerKind::Blocks(category) => match category {
            Category::Parameter | Category::Buffer | Category::UnshardedParameter | Category::AllGather => 0,
            Category::KvCache => KV_CACHE,
            Category::Activation
            | Category::Temporary
            | Category::Input
            | Category::Gradient
            | Category::AutogradDetail => 2,
            Category::CudaGraph => GRAPHS,
            Category::Workspace => WORKSPACES,
            _ => 5,
        },
        LedgerKind::BlockOverhead | LedgerKind::Cache => CACHE,
        LedgerKind::Graphs => GRAPHS,
        LedgerKind::Library(name) => match name.as_str() {
            CUBLAS => WORKSPACES,
            NCCL => 7,
            _ => 8,
        },
        LedgerKind::Context => 9,
        LedgerKind::OtherProcesses
        | LedgerKind::PerhapsOthers
        | LedgerKind::Host
        | LedgerKind::PageCache
        | LedgerKind::Unexplained => OTHERS,
    }
}

/// The number of tokens of the sequence whose cost is shown.
const SEQUENCE: i64 = 8192;

const TOKENS: Flag = Flag {
    name: "tokens",
    value: Some("N"),
    default: "",
    choices: &[],
    help: "The capacity of the KV cache in tokens, if the trace does not record it",
};

impl Report for Serving {
    fn name(&self) -> &'static str {
        "serving"
    }

    fn about(&self) -> &'static str {
        "Show what a model server holds: weights, KV cache, activations, graphs, NCCL, context, free"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[("serving out", "weights, KV cache, activations and the rest of a model server")]
    }

    fn flags(&self) -> &'static [Flag] {
        const { &[Flag { default: "peak", ..moment::FLAG }, TOKENS] }
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let at: NamedMoment = options.text(moment::FLAG.name).parse()?;
        let tokens = options.count(TOKENS.name)?.map(|tokens| tokens as i64);
        let mut footer = Footer::of([input]);
        // The devices by host and ordinal. Assumes that all processes of a host number the GPUs in the same
        // way, which is not checked.
        let mut devices: BTreeMap<(String, i32), ServedDevice> = BTreeMap::new();
        for trace in &input.traces {
            let (later, profile, whole) = read_whole(trace, options)?;
            let Some((replayed, states)) = states_at(trace, &at, options, &later)? else {
                footer.add_reading(trace, &whole);
                continue;
            };
            footer.add_reading(trace, &replayed);
            footer.note_inference(&replayed);
            for state in states {
                footer.add_share(&replayed, state.ordinal);
                for note in &state.notes {
                    if !footer.notes.contains(note) {
                        footer.notes.push(note.clone());
                    }
                }
                let key = (trace.meta.host.clone(), state.ordinal);
                devices.entry(key).or_default().add(&state, &profile);
            }
        }
        let mut printer = options.printer();
        if let Some(trace) = input.traces.first().filter(|_| !devices.is_empty()) {
            heading(&mut printer, input, &trace.meta);
        } else {
            printer.plain("No memory tracked.");
        }
        let mut json = Vec::new();
        let hosts: BTreeSet<&str> = devices.keys().map(|(host, _)| host.as_str()).collect();
        let has_hosts = hosts.len() > 1;
        for ((host, ordinal), device) in &mut devices {
            device.finish(tokens);
            printer.gap();
            let of_host = if has_hosts { format!(" of {}", printable(host)) } else { String::new() };
            device.print(&format!("device {ordinal}{of_host}"), &mut printer, options);
            json.push(device.json(host, *ordinal));
        }
        Ok(Answer {
            next: vec![next("ledger", input, ""), next("peak", input, "--by category")],
            ..Answer::new(printer, json!({ "devices": json }), footer)
        })
    }
}

/// Reads facts that a replay up to one moment misses: the last category that a tag gave each block (a cache
/// is recognized only after the call that filled it), the pools of graphs, and the size of the KV cache
/// according to the server.
fn read_whole(trace: &TraceFile, options: &Options) -> Result<(Later, ProfileRun, Replayed)> {
    let (mut later, mut profile) = (Later::default(), ProfileRun::default());
    let whole = replay_trace(
        trace,
        Columns::of(&["name", "pool"]),
        options,
        Metric::Allocated,
        KnownCategories::default(),
        |row, replay| {
            profile.feed(row, replay);
            later.feed(row);
        },
    )?;
    Ok((later, profile, whole))
}

/// The memory of one device, over all processes.
#[derive(Default)]
struct ServedDevice {
    processes: u64,
    total: i64,
    used: i64,
    bytes: [i64; HELD_BY.len()],
    /// Like `bytes`, for memory that is unmapped while the server sleeps. This memory is not included in
    /// `used`.
    asleep: [i64; HELD_BY.len()],
    /// The number of the allocator's blocks that hold keys and values.
    kv_tensors: u64,
    /// The number of blocks in the KV cache, as the server reports it. `kv_tokens` is the number of its
    /// tokens.
    kv_blocks: i64,
    kv_tokens: i64,
    /// The highest temporary memory of the forwards that ran before the KV cache was allocated.
    profile_run: i64,
}

impl ServedDevice {
    fn add(&mut self, state: &LedgerState, profile: &ProfileRun) {
        self.processes += 1;
        self.total = self.total.max(state.total);
        self.used = self.used.max(state.used);
        for line in &state.lines {
            let place = place(line);
            self.bytes[place] += line.bytes;
            if place == KV_CACHE {
                self.kv_tensors += line.blocks;
            }
        }
        for line in &state.asleep {
            self.asleep[place(line)] += line.bytes;
        }
        // Memory that a captured graph has freed stays in the graph's pool, and only replays of the graph can
        // use it.
        let free = state.graphs_free.min(self.bytes[CACHE]);
        self.bytes[CACHE] -= free;
        self.bytes[GRAPHS] += free;
        let (blocks, tokens) = profile.room;
        (self.kv_blocks, self.kv_tokens) = (self.kv_blocks.max(blocks), self.kv_tokens.max(tokens));
        let before = profile.before_cache.get(&state.ordinal).copied().unwrap_or(0);
        self.profile_run = self.profile_run.max(before);
    }

    /// Completes the sums once all processes are added.
    fn finish(&mut self, tokens: Option<i64>) {
        self.kv_tokens = tokens.unwrap_or(self.kv_tokens);
        // For each process, the other processes of this server are other processes. So compute the memory of
        // other processes as the rest of the memory in use.
        let own: i64 = self.bytes[..OTHERS].iter().sum();
        if self.processes > 1 {
            self.bytes[OTHERS] = (self.used - own).max(0);
        }
        self.used = self.bytes.iter().sum();
    }

    fn free(&self) -> i64 {
        (self.total - self.used).max(0)
    }

    /// Returns the bytes of one token, and the number of sequences of [`SEQUENCE`] tokens that fit into the
    /// KV cache. Returns `None` if the number of tokens is unknown or there is no cache.
    fn of_token(&self) -> Option<(i64, f64)> {
        let per_token = self.bytes[KV_CACHE].checked_div(self.kv_tokens).filter(|bytes| *bytes > 0)?;
        Some((per_token, self.kv_tokens as f64 / SEQUENCE as f64))
    }

    fn print(&self, name: &str, printer: &mut Printer, options: &Options) {
        let units = options.units;
        let mut first = format!(" used on {name}");
        if self.total > 0 {
            first += &format!(" of {} ({})", units.show(self.total), percent(share(self.used, self.total)));
        }
        if self.processes > 1 {
            first += &format!(", by {}", counted(self.processes, "process"));
        }
        printer.line([Cell::new(units.show(self.used).to_string(), Style::Strong), first.into()]);
        let mut table = Table::new(&[
            ("bytes", Side::Right),
            ("share", Side::Right),
            ("", Side::Left),
            ("held by", Side::Left),
        ]);
        let whole = if self.total > 0 { self.total } else { self.used };
        let free = if self.total > 0 { self.free() } else { 0 };
        for (held_by, bytes) in HELD_BY.iter().copied().zip(self.bytes).chain([("free", free)]) {
            if bytes > 0 {
                table.row([
                    Cell::new(units.show(bytes).to_string(), Style::Strong),
                    percent(share(bytes, whole)).into(),
                    bar(share(bytes, whole), 12).into(),
                    held_by.into(),
                ]);
            }
        }
        printer.table(&table);
        if self.processes > 1 && self.total > 0 && self.used > self.total {
            printer.plain(
                "This is more than the device has: the processes did not run at the same time, or each saw another \
                 card under this number. memtrace serving FILE shows one process.",
            );
        }
        let asleep: Vec<_> =
            HELD_BY.iter().copied().zip(self.asleep).filter(|(_, bytes)| *bytes > 0).collect();
        print_asleep(&asleep, printer, options);
        if self.kv_blocks > 0 {
            printer.plain(format!(
                "KV cache: {} blocks for {} tokens",
                count(self.kv_blocks.cast_unsigned()),
                count(self.kv_tokens.max(0).cast_unsigned())
            ));
        }
        if let Some((per_token, sequences)) = self.of_token() {
            printer.plain(format!(
                "a sequence of {} tokens takes {} of the KV cache; there is room for {sequences:.1} such \
                 sequences",
                count(SEQUENCE.cast_unsigned()),
                units.show(per_token * SEQUENCE),
            ));
        }
        if self.profile_run > 0 {
            let bytes = units.show(self.profile_run);
            printer.plain(format!(
                "the forward passes before the KV cache was allocated used up to {bytes} of temporary memory"
            ));
        }
    }

    fn json(&self, host: &str, ordinal: i32) -> Value {
        let rows: Vec<Value> = HELD_BY
            .iter()
            .zip(self.bytes.iter().zip(self.asleep))
            .map(|(held_by, (bytes, asleep))| {
                json!({ "held_by": held_by, "bytes": bytes, "asleep_bytes": asleep })
            })
            .collect();
        let token = self.of_token();
        json!({
            "host": host,
            "device": ordinal,
            "processes": self.processes,
            "total_bytes": self.total,
            "used_bytes": self.used,
            "free_bytes": self.free(),
            "rows": rows,
            "kv_tensors": self.kv_tensors,
            "kv_blocks": self.kv_blocks,
            "kv_tokens": self.kv_tokens,
            "kv_bytes_per_token": token.map(|(bytes, _)| bytes),
            "sequences_of_8192": token.map(|(_, sequences)| sequences),
            "profile_run_bytes": self.profile_run,
        })
    }
}

/// The forwards that a server runs before it allocates its KV cache, to measure the memory of activations.
#[derive(Default)]
struct ProfileRun {
    /// For each device: the highest total so far.
    highest: FxHashMap<i32, i64>,
    /// For each large block without a category, by `alloc_id`: the highest temporary memory before its
    /// allocation.
    candidates: FxHashMap<i64, i64>,
    before_cache: FxHashMap<i32, i64>,
    /// The number of blocks and the number of tokens in the KV cache, as the server reports them.
    room: (i64, i64),
}

/// The smallest block that may be the first of a KV cache, in bytes.
const LARGE: i64 = 1 << 20;

impl ProfileRun {
    fn feed(&mut self, row: &Record, replay: &Replay) {
        match row.event {
            EventName::Alloc => {
                let now = replay.find(row.device).map_or(0, |device| device.totals.allocated);
                let highest = self.highest.entry(row.device).or_default();
                if row.category.is_unclaimed() && row.delta_bytes >= LARGE {
                    let stayed = now - row.delta_bytes;
                    self.candidates.insert(row.alloc_id, (*highest - stayed).max(0));
                }
                *highest = now.max(*highest);
            }
            EventName::Tag if row.category == Category::KvCache && row.delta_bytes > 0 => {
                if let Some(taken) = self.candidates.remove(&row.alloc_id) {
                    self.before_cache.entry(row.device).or_insert(taken);
                }
            }
            EventName::Free => {
                self.candidates.remove(&row.alloc_id);
            }
            EventName::Mark => {
                let mark = ServerMark::parse(&replay.symbols.get(row.name));
                if let Some(ServerMark::Cache { blocks, tokens }) = mark {
                    self.room = (blocks, tokens);
                }
            }
            _ => {}
        }
    }
}
