//! Reads a trace into blocks and the flow of data between ops.

use std::collections::hash_map::Entry;

use memtrace_trace::{Api, Category, EventName};
use rustc_hash::FxHashMap;

use super::flow::{Access, AccessEvent, FlowBuilder, Node};
use super::types::ProfiledBlock;
use crate::error::Result;
use crate::options::Options;
use crate::read::record::{Columns, Record};
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::problems::Counts;
use crate::state::replay::{self, MemoryKind, Metric, Replay};
use crate::state::replay_trace::replay_rows;

/// The blocks of a trace, and the flow of data between its ops.
#[derive(Default)]
pub(super) struct BlocksAndFlow {
    pub(super) blocks: Vec<ProfiledBlock>,
    pub(super) nodes: Vec<Node>,
    /// The last version of each block, by its index.
    pub(super) versions: Vec<u32>,
    /// True if the trace has io records.
    pub(super) has_io: bool,
    /// True if the trace has tags.
    pub(super) has_tags: bool,
}

/// Reads the part of `trace` that `options` selects. This reads the file once.
pub(super) fn read(trace: &TraceFile, options: &Options) -> Result<BlocksAndFlow> {
    let mut reader = FlowReader::default();
    let columns = Columns::of(&["ts_ns", "tid", "api", "alloc_id", "addr", "op", "latency_ns", "category"]);
    replay_rows(trace, replay::COLUMNS.and(columns), options, Metric::Allocated, |row, replay| {
        if replay.in_window() {
            reader.feed(row, replay);
        }
    })?;
    let FlowReader { mut reading, flow, .. } = reader;
    if reading.has_io {
        (reading.nodes, reading.versions) = flow.finish(reading.blocks.len());
    } else {
        reading.versions = vec![0; reading.blocks.len()];
    }
    Ok(reading)
}

/// The symbols of the texts that rows are compared with. Symbols are compared because that is faster.
struct KnownSymbols {
    operator: Symbol,
    backward_function: Symbol,
    read: Symbol,
    write: Symbol,
    read_write: Symbol,
    given: Symbol,
    cpu_allocator: Symbol,
    accumulate_grad: Symbol,
}

impl KnownSymbols {
    fn new(symbols: &SymbolTable) -> KnownSymbols {
        let api = |api: Api| symbols.intern(api.as_str());
        KnownSymbols {
            operator: api(Api::Operator),
            backward_function: api(Api::BackwardFunction),
            read: api(Api::Read),
            write: api(Api::Write),
            read_write: api(Api::ReadWrite),
            given: api(Api::Given),
            cpu_allocator: api(Api::CpuAllocator),
            accumulate_grad: symbols.intern("torch::autograd::AccumulateGrad"),
        }
    }
}

#[derive(Default)]
struct FlowReader {
    known: Option<KnownSymbols>,
    reading: BlocksAndFlow,
    flow: FlowBuilder,
    /// The index of each live block, by `alloc_id`.
    live: FxHashMap<i64, u32>,
}

impl FlowReader {
    fn feed(&mut self, row: &Record, replay: &Replay) {
        let known = match self.known.take() {
            Some(known) => known,
            None => {
                // At the first row of the window, the live blocks are those that were allocated earlier.
                let mut before: Vec<_> =
                    replay.live().values().filter(|block| block.kind != MemoryKind::External).collect();
                before.sort_by_key(|block| block.id);
                let has_tags = replay.counts.of(EventName::Tag) > 0;
                for block in before.into_iter().filter(|block| block.id != row.alloc_id) {
                    let (addr, recorded) = (block.addr, block.owner.category);
                    // In a trace with tags, an allocation has one of these categories or that of a library, so
                    // most others are from a `tag` row.
                    let at_alloc = matches!(
                        recorded,
                        Category::None
                            | Category::Script
                            | Category::Loaded
                            | Category::Activation
                            | Category::Temporary
                            | Category::CudaGraph
                    );
                    let index = self.add(ProfiledBlock {
                        addr,
                        recorded,
                        tagged: has_tags && !at_alloc,
                        ..block_of(block.id, block.device, block.bytes)
                    });
                    self.reading.has_tags |= self.reading.blocks[index as usize].tagged;
                }
                KnownSymbols::new(&replay.symbols)
            }
        };
        self.row(row, &known, &replay.counts);
        self.known = Some(known);
    }

    fn add(&mut self, block: ProfiledBlock) -> u32 {
        let index = self.reading.blocks.len() as u32;
        if block.id != 0 {
            self.live.insert(block.id, index);
        }
        self.reading.blocks.push(block);
        index
    }

    fn record(&mut self, row: &Record, block: u32, access: Access) {
        self.flow.record(row.tid, AccessEvent { ts_ns: row.ts_ns, block, access });
    }

    fn row(&mut self, row: &Record, known: &KnownSymbols, counts: &Counts) {
        match row.event {
            EventName::HostAlloc | EventName::HostFree if row.api != known.cpu_allocator => {}
            EventName::Alloc | EventName::HostAlloc if row.alloc_id != 0 => {
                let born_ns = Some(row.ts_ns);
                let (addr, recorded) = (row.addr, row.category);
                let index = self.add(ProfiledBlock {
                    addr,
                    recorded,
                    born_ns,
                    ..block_of(row.alloc_id, row.device, row.delta_bytes)
                });
                self.record(row, index, Access::Alloc);
            }
            EventName::Live if row.alloc_id != 0 && !self.live.contains_key(&row.alloc_id) => {
                let (addr, recorded) = (row.addr, row.category);
                // The rows that open a part come before all others. A later row is of a block that was
                // allocated in a brief step, so its allocation has no time of its own.
                let is_brief =
                    [EventName::Alloc, EventName::Op, EventName::Brief].map(|event| counts.of(event));
                let born_ns = (is_brief != [0; 3]).then_some(row.ts_ns);
                self.add(ProfiledBlock {
                    addr,
                    recorded,
                    born_ns,
                    ..block_of(row.alloc_id, row.device, row.delta_bytes)
                });
            }
            EventName::Free | EventName::HostFree => self.free(row),
            EventName::Tag if row.delta_bytes > 0 => {
                self.reading.has_tags = true;
                if let Entry::Occupied(index) = self.live.entry(row.alloc_id) {
                    let block = &mut self.reading.blocks[*index.get() as usize];
                    (block.recorded, block.tagged) = (row.category, true);
                }
            }
            EventName::Io => {
                let access = match row.api {
                    api if api == known.read => Access::Read,
                    api if api == known.write || api == known.read_write => Access::Write,
                    api if api == known.given => Access::Passed,
                    _ => return,
                };
                self.reading.has_io = true;
                if let Some(index) = self.live.get(&row.alloc_id).copied() {
                    self.record(row, index, access);
                }
            }
            EventName::Op => {
                let backward = row.api == known.backward_function;
                if backward || row.api == known.operator {
                    self.reading.has_io = true;
                    let accumulates = backward && row.op == known.accumulate_grad;
                    self.flow.end_node(
                        row.tid,
                        row.ts_ns.wrapping_sub(row.latency_ns),
                        backward,
                        accumulates,
                    );
                }
            }
            _ => {}
        }
    }

    fn free(&mut self, row: &Record) {
        let index = match self.live.remove(&row.alloc_id) {
            Some(index) => index,
            // The trace has no allocation of this block, so it was allocated before the trace began.
            None => {
                let (addr, recorded) = (row.addr, row.category);
                self.add(ProfiledBlock { addr, recorded, ..block_of(0, row.device, -row.delta_bytes) })
            }
        };
        self.reading.blocks[index as usize].died_ns = Some(row.ts_ns);
        self.record(row, index, Access::Free);
    }
}

/// Returns a block that was allocated before the trace or the window, and whose other fields are unknown.
fn block_of(id: i64, device: i32, bytes: i64) -> ProfiledBlock {
    let recorded = Category::None;
    ProfiledBlock { id, device, addr: 0, bytes, born_ns: None, died_ns: None, recorded, tagged: false }
}
