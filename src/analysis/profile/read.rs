//! A trace as blocks and the flow of data between ops.

use std::collections::hash_map::Entry;

use memtrace_trace::{Api, Category as TraceCategory, EventName};
use rustc_hash::FxHashMap;

use super::flow::{Access, AccessEvent, FlowBuilder, Node};
use super::types::Block;
use crate::error::Result;
use crate::options::Options;
use crate::read::record::{Columns, Record};
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::replay::{self, HOST, MemoryKind, Metric, Replay};
use crate::state::replay_trace::replay_rows;

/// What [`read`] found.
#[derive(Default)]
pub(super) struct BlocksAndFlow {
    pub(super) blocks: Vec<Block>,
    pub(super) nodes: Vec<Node>,
    /// The last version of each block.
    pub(super) versions: Vec<u32>,
    pub(super) has_io: bool,
    pub(super) has_tags: bool,
}

/// Reads the trace once.
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

/// The texts that rows are compared with.
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
        let api = |api: Api| symbols.intern(api.name());
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
    words: Option<KnownSymbols>,
    reading: BlocksAndFlow,
    flow: FlowBuilder,
    /// The place of each live block, by `alloc_id`.
    live: FxHashMap<i64, u32>,
}

impl FlowReader {
    fn feed(&mut self, row: &Record, replay: &Replay) {
        let words = match self.words.take() {
            Some(words) => words,
            None => {
                // The first row of the window: what is live was there before it.
                let mut before: Vec<_> =
                    replay.live.values().filter(|block| block.kind != MemoryKind::Outside).collect();
                before.sort_by_key(|block| block.id);
                for block in before.into_iter().filter(|block| block.id != row.alloc_id) {
                    let (addr, recorded) = (block.addr, block.owner.category);
                    // What lives from step to step and has a use that is no birth's was tagged.
                    let birth = matches!(
                        recorded,
                        TraceCategory::None | TraceCategory::Activation | TraceCategory::Temporary
                    );
                    let place = self.add(Block {
                        addr,
                        recorded,
                        tagged: !birth,
                        ..block_of(block.id, block.device, block.bytes)
                    });
                    self.reading.has_tags |= self.reading.blocks[place as usize].tagged;
                }
                KnownSymbols::new(&replay.symbols)
            }
        };
        self.row(row, &words);
        self.words = Some(words);
    }

    fn add(&mut self, block: Block) -> u32 {
        let place = self.reading.blocks.len() as u32;
        if block.id != 0 {
            self.live.insert(block.id, place);
        }
        self.reading.blocks.push(block);
        place
    }

    fn did(&mut self, row: &Record, block: u32, did: Access) {
        self.flow.did(row.tid, AccessEvent { ts_ns: row.ts_ns, block, did });
    }

    fn row(&mut self, row: &Record, words: &KnownSymbols) {
        match row.event {
            EventName::HostAlloc | EventName::HostFree if row.api != words.cpu_allocator => {}
            EventName::Alloc | EventName::HostAlloc if row.alloc_id != 0 => {
                let device = if row.event == EventName::Alloc { row.device } else { HOST };
                let born_ns = Some(row.ts_ns);
                let (addr, recorded) = (row.addr, row.category);
                let place = self.add(Block {
                    addr,
                    recorded,
                    born_ns,
                    ..block_of(row.alloc_id, device, row.delta_bytes)
                });
                self.did(row, place, Access::Made);
            }
            EventName::Live if row.alloc_id != 0 && !self.live.contains_key(&row.alloc_id) => {
                let (addr, recorded) = (row.addr, row.category);
                self.add(Block { addr, recorded, ..block_of(row.alloc_id, row.device, row.delta_bytes) });
            }
            EventName::Free | EventName::HostFree => self.free(row),
            EventName::Tag if row.delta_bytes > 0 => {
                self.reading.has_tags = true;
                if let Entry::Occupied(place) = self.live.entry(row.alloc_id) {
                    let block = &mut self.reading.blocks[*place.get() as usize];
                    (block.recorded, block.tagged) = (row.category, true);
                }
            }
            EventName::Io => {
                let did = match row.api {
                    api if api == words.read => Access::Read,
                    api if api == words.write || api == words.read_write => Access::Wrote,
                    api if api == words.given => Access::Got,
                    _ => return,
                };
                self.reading.has_io = true;
                if let Some(place) = self.live.get(&row.alloc_id).copied() {
                    self.did(row, place, did);
                }
            }
            EventName::Op => {
                let backward = row.api == words.backward_function;
                if backward || row.api == words.operator {
                    self.reading.has_io = true;
                    let accumulates = backward && row.op == words.accumulate_grad;
                    self.flow.ended(row.tid, row.ts_ns.wrapping_sub(row.latency_ns), backward, accumulates);
                }
            }
            _ => {}
        }
    }

    fn free(&mut self, row: &Record) {
        let place = match self.live.remove(&row.alloc_id) {
            Some(place) => place,
            // Its allocation is not in the trace: it was there before.
            None => {
                let (addr, recorded) = (row.addr, row.category);
                self.add(Block { addr, recorded, ..block_of(0, row.device, -row.delta_bytes) })
            }
        };
        self.reading.blocks[place as usize].died_ns = Some(row.ts_ns);
        self.did(row, place, Access::Dropped);
    }
}

/// A block that was there before, of which nothing more is known.
fn block_of(id: i64, device: i32, bytes: i64) -> Block {
    let recorded = TraceCategory::None;
    Block { id, device, addr: 0, bytes, born_ns: None, died_ns: None, recorded, tagged: false }
}
