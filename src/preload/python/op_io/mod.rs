//! `MEMTRACE_OPS=io`: the storages that an op reads and writes.
//!
//! An op with a schema that no such op called, and a backward function, are what `torch.profiler` calls
//! leaves. Each storage that such an op, or an op inside it, is given gets an event the first time it is
//! seen, and another one when something inside does more to it than that. Whether an op changes a storage
//! is what the schema of the op says, as for the profiler: versions of tensors could only be compared with
//! the tensors held, and a count of references that is not the program's own changes what torch does.
//!
//! Nothing of torch is called and no reference is taken: fields of objects that live while the start
//! callbacks run are read at the places that [`learn`] found. Without them io records are off, and ops get
//! the rows of `MEMTRACE_OPS=all`.

mod layout;
pub(crate) mod learn;

use std::cell::RefCell;
use std::ffi::c_void;

use memtrace_record::Recorder;
use memtrace_record::intern::{ContextId, TextId};
use memtrace_record::recorder::text_id;
use memtrace_trace::{Api, Event, Header, Payload};
use rustc_hash::FxHashMap;

use crate::attribution::context;
use crate::attribution::op_stack::{self, Ending};
use crate::runtime::pause;
use crate::runtime::session;
use crate::runtime::thread::running_ops::{NameOf, Scope};
use layout::{CPU, CUDA, LAYOUT, Layout};

/// What is known of a schema, by its address: schemas live as long as their ops are registered.
struct Schema {
    uses: Vec<Api>,
    overload: TextId,
}

/// The leaf that runs on a thread.
struct Leaf {
    record: *const c_void,
    /// How many ops it is in, with itself.
    depth: usize,
    api: Api,
    context: ContextId,
    step: i32,
}

#[derive(Default)]
struct Io {
    leaf: Option<Leaf>,
    /// What was told of each storage in this leaf, a bit for each use.
    seen: FxHashMap<u64, u8>,
    schemas: FxHashMap<usize, Schema>,
}

thread_local! {
    static IO: RefCell<Option<Io>> = const { RefCell::new(None) };
}

fn with_io<R>(work: impl FnOnce(&mut Io) -> R) -> Option<R> {
    IO.try_with(|io| Some(work(io.try_borrow_mut().ok()?.get_or_insert_default()))).ok().flatten()
}

/// Are io records asked for?
pub(crate) fn is_wanted() -> bool {
    session::session().is_some_and(|session| session.settings.ops.io())
}

/// An op began on this thread; [`op_stack::enter`] knows it already.
pub(crate) fn enter(scope: Scope, record: *const c_void, name_of: NameOf) {
    let Some(layout) = LAYOUT.get() else { return learn::watch(record, name_of) };
    let Some((depth, is_told)) = op_stack::innermost() else { return };
    with_io(|io| {
        // A leaf whose end was not seen (it ended on another thread) is over.
        io.leaf.take_if(|leaf| leaf.depth >= depth);
        let schema = if scope == Scope::Function { io.schema(layout, record) } else { None };
        if io.leaf.is_none() {
            let api = match (scope, schema) {
                (Scope::Backward, _) => Api::BackwardFunction,
                (Scope::Function, Some(_)) => Api::Operator,
                _ => return,
            };
            if !is_told {
                return;
            }
            let (context, step) = context::current();
            io.seen.clear();
            io.leaf = Some(Leaf { record, depth, api, context, step });
        }
        io.tell(layout, record, schema);
    });
}

/// How the row of an op is to end: what the op is, and its overload.
pub(crate) fn leave(record: *const c_void) -> Ending {
    let Some(layout) = LAYOUT.get() else { return Ending::default() };
    with_io(|io| {
        let leaf = io.leaf.take_if(|leaf| leaf.record == record);
        let overload = io
            .schema(layout, record)
            .and_then(|schema| io.schemas.get(&schema))
            .map_or(0, |schema| schema.overload);
        Ending { api: leaf.map_or(Api::RecordFunction, |leaf| leaf.api), overload }
    })
    .unwrap_or_default()
}

impl Io {
    /// The schema of an op, looked at when it is new.
    fn schema(&mut self, layout: &Layout, record: *const c_void) -> Option<usize> {
        // SAFETY: the op runs, so its record is alive.
        let schema = unsafe { layout.schema(record) }?;
        self.schemas.entry(schema).or_insert_with(|| {
            // SAFETY: the address of a schema.
            let (uses, overload) = unsafe { (layout.uses(schema), layout.overload(schema)) };
            let overload = if overload.is_empty() { b"default" } else { overload };
            Schema { uses, overload: text_id(&String::from_utf8_lossy(overload)) }
        });
        Some(schema)
    }

    /// Tells what an op in the leaf is given.
    fn tell(&mut self, layout: &Layout, record: *const c_void, schema: Option<usize>) {
        let Io { leaf: Some(leaf), seen, schemas } = self else { return };
        let Some(recorder) = Recorder::active() else { return };
        let uses = schema.and_then(|schema| schemas.get(&schema)).map(|schema| schema.uses.as_slice());
        let visit = |argument: usize, tensor: usize| {
            // SAFETY: an input of an op that starts is alive.
            let Some(memory) = (unsafe { layout.memory(tensor) }) else { return };
            let device = match memory.device {
                (CUDA, index) if index >= 0 => index,
                (CPU, _) if wants_host() => Event::HOST,
                _ => return,
            };
            let api = match uses {
                Some(uses) => uses.get(argument).copied().unwrap_or(Api::Read),
                None => Api::Given,
            };
            let bit = 1 << (api as u8 - Api::Read as u8);
            let told = seen.entry(memory.addr).or_default();
            // Who changes it in place also reads it.
            let covers =
                bit | if api == Api::Read { 1 << (Api::ReadWrite as u8 - Api::Read as u8) } else { 0 };
            if *told & covers != 0 {
                return;
            }
            *told |= bit;
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
        // SAFETY: the start callbacks of the record run.
        unsafe { layout.tensors(record, visit) };
    }
}

fn wants_host() -> bool {
    session::session().is_some_and(|session| session.settings.host_tensors)
}

/// The memory of a module, or of one of its calls, on a device: its bytes, and the same rounded.
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
