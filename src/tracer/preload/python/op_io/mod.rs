//! `MEMTRACE_OPS=io`: the storages that an op reads and writes.
//!
//! The unit is a leaf in the sense of `torch.profiler`: an op with a schema that was not called by another
//! such op, or a backward function. Each input storage of a leaf, or of an op inside the leaf, gets an event
//! at its first use. It gets another event if a later op in the leaf uses it differently, such as a write
//! after a read. Whether an op changes a storage is derived from its schema, as in the profiler. Comparing
//! the versions of tensors instead would require references to the tensors, and additional references change
//! torch's behavior.
//!
//! No function of torch is called and no reference is taken. The fields are read, at the offsets that
//! [`learn`] found, from objects that are alive while the start callbacks run. If the offsets are unknown, op
//! io is off, and ops get the rows of `MEMTRACE_OPS=all`.

mod layout;
pub(crate) mod learn;

use std::cell::RefCell;
use std::ffi::c_void;

use memtrace_record::Recorder;
use memtrace_record::intern::{ContextId, TextId};
use memtrace_record::per_thread::PerThread;
use memtrace_record::recorder::text_id;
use memtrace_trace::{Api, Event, Header, Payload};
use rustc_hash::FxHashMap;

use crate::attribution::context;
use crate::attribution::op_stack::{self, Ending};
use crate::runtime::pause;
use crate::runtime::session;
use crate::runtime::thread::running_ops::{NameOf, Scope};
use layout::{CPU, CUDA, LAYOUT, Layout};

/// The fields of an op's schema that op io needs.
struct Schema {
    /// The use of each argument.
    uses: Vec<Api>,
    overload: TextId,
}

/// The leaf that runs on a thread (see the module's documentation).
struct Leaf {
    record: *const c_void,
    /// The number of ops that ran on the thread when the leaf began, including the leaf.
    depth: usize,
    api: Api,
    context: ContextId,
    step: i32,
}

#[derive(Default)]
struct ThreadIo {
    leaf: Option<Leaf>,
    /// The uses of each storage that this leaf has recorded, as bits, by the address of the storage's memory.
    seen: FxHashMap<u64, u8>,
    /// The schemas that were read, by the address of the schema. torch keeps a schema as long as its op is
    /// registered.
    schemas: FxHashMap<usize, Schema>,
}

static IO: PerThread<RefCell<ThreadIo>> = PerThread::new(RefCell::default);

fn with_io<R>(work: impl FnOnce(&mut ThreadIo) -> R) -> Option<R> {
    IO.with(|io| Some(work(&mut *io.try_borrow_mut().ok()?))).flatten()
}

/// Returns true if `MEMTRACE_OPS=io` is set.
pub(crate) fn is_wanted() -> bool {
    session::session().is_some_and(|session| session.settings.ops.io())
}

/// Records the input storages of an op that began on this thread. Called after [`op_stack::enter`] for the
/// op.
///
/// # Safety
/// `record` is a live `RecordFunction` whose start callbacks run, and `name_of` gives its name.
pub(crate) unsafe fn enter(scope: Scope, record: *const c_void, name_of: NameOf) {
    // SAFETY: by the contract.
    let Some(layout) = LAYOUT.get() else { return unsafe { learn::observe(record, name_of) } };
    let Some((depth, has_row)) = op_stack::innermost() else { return };
    with_io(|io| {
        // A leaf at the same depth or deeper has ended on another thread, so its end was not seen here.
        io.leaf.take_if(|leaf| leaf.depth >= depth);
        // SAFETY: by the contract.
        let schema = if scope == Scope::Function { unsafe { io.schema(layout, record) } } else { None };
        if io.leaf.is_none() {
            let api = match (scope, schema) {
                (Scope::Backward, _) => Api::BackwardFunction,
                (Scope::Function, Some(_)) => Api::Operator,
                _ => return,
            };
            if !has_row {
                return;
            }
            let (context, step) = context::current();
            io.seen.clear();
            io.leaf = Some(Leaf { record, depth, api, context, step });
        }
        // SAFETY: by the contract.
        unsafe { io.record_inputs(layout, record, schema) };
    });
}

/// Ends the thread's leaf if the op is the leaf. Returns the kind and the overload of the op for its row.
///
/// # Safety
/// `record` is a live `RecordFunction`.
pub(crate) unsafe fn leave(record: *const c_void) -> Ending {
    let Some(layout) = LAYOUT.get() else { return Ending::default() };
    with_io(|io| {
        let leaf = io.leaf.take_if(|leaf| leaf.record == record);
        // SAFETY: by the contract.
        let schema = unsafe { io.schema(layout, record) };
        let overload = schema.and_then(|schema| io.schemas.get(&schema)).map_or(0, |schema| schema.overload);
        Ending { api: leaf.map_or(Api::RecordFunction, |leaf| leaf.api), overload }
    })
    .unwrap_or_default()
}

impl ThreadIo {
    /// Returns the address of an op's schema, or `None` if the record has no schema. Reads the schema at its
    /// first use on this thread.
    ///
    /// # Safety
    /// `record` is a live `RecordFunction`.
    unsafe fn schema(&mut self, layout: &Layout, record: *const c_void) -> Option<usize> {
        // SAFETY: by the contract.
        let schema = unsafe { layout.schema(record) }?;
        self.schemas.entry(schema).or_insert_with(|| {
            // SAFETY: `schema` is the address of a schema.
            let (uses, overload) = unsafe { (layout.uses(schema), layout.overload(schema)) };
            let overload = if overload.is_empty() { b"default" } else { overload };
            Schema { uses, overload: text_id(&String::from_utf8_lossy(overload)) }
        });
        Some(schema)
    }

    /// Records the storages among the inputs of an op in the leaf.
    ///
    /// # Safety
    /// `record` is a live `RecordFunction` whose start callbacks run.
    unsafe fn record_inputs(&mut self, layout: &Layout, record: *const c_void, schema: Option<usize>) {
        let ThreadIo { leaf: Some(leaf), seen, schemas } = self else { return };
        let Some(recorder) = Recorder::active() else { return };
        let uses = schema.and_then(|schema| schemas.get(&schema)).map(|schema| schema.uses.as_slice());
        let visit = |argument: usize, tensor: usize| {
            // SAFETY: an input of an op that starts is alive.
            let Some(memory) = (unsafe { layout.memory(tensor) }) else { return };
            let device = match memory.device {
                (CUDA, index) if index >= 0 => index,
                (CPU, _) if wants_host() => Event::CPU,
                _ => return,
            };
            let api = match uses {
                Some(uses) => uses.get(argument).copied().unwrap_or(Api::Read),
                None => Api::Given,
            };
            let bit = 1 << (api as u8 - Api::Read as u8);
            let recorded = seen.entry(memory.addr).or_default();
            // A read needs no event of its own if the change of the storage in place is recorded, because
            // that event includes a read.
            let covers =
                bit | if api == Api::Read { 1 << (Api::ReadWrite as u8 - Api::Read as u8) } else { 0 };
            if *recorded & covers != 0 {
                return;
            }
            *recorded |= bit;
            if recorder.is_short() {
                return recorder.drop_op();
            }
            let (context, step) = (leaf.context, leaf.step);
            recorder.record(|clock_ns| {
                Payload::Io { address: memory.addr, bytes: memory.bytes, rounded: 0 }.pack(Header {
                    clock_ns,
                    api: Some(api),
                    device,
                    context,
                    step,
                })
            });
        };
        // SAFETY: by the contract.
        unsafe { layout.tensors(record, visit) };
    }
}

fn wants_host() -> bool {
    session::session().is_some_and(|session| session.settings.host_tensors)
}

/// Records the memory of a module, or of one of its calls, on a device: the exact number of bytes, and the
/// number rounded up to the allocator's block sizes.
pub(crate) fn module_memory(api: Api, device: i8, bytes: i64, rounded: i64) {
    let Some(recorder) = Recorder::active().filter(|_| !pause::is_paused()) else { return };
    let (context, step) = context::current();
    recorder.record(|clock_ns| {
        Payload::Io { address: 0, bytes, rounded }.pack(Header {
            clock_ns,
            api: Some(api),
            device,
            context,
            step,
        })
    });
}
