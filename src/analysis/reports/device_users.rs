//! The processes that have memory on each GPU, including processes that mainly work on another GPU.

use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use memtrace_trace::first_use::FirstUse;
use memtrace_trace::memory::MemoryKind;
use memtrace_trace::{Api, EventName};

use super::first_call::{FirstCall, UNKNOWN_CALL};
use crate::error::Result;
use crate::options::Options;
use crate::read::input::Input;
use crate::read::record::{Columns, Record};
use crate::read::stream::TraceFile;
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::render::process_names::{parent, process_name};
use crate::state::block::Owner;
use crate::state::categories::KnownCategories;
use crate::state::levels::{Level, Levels};
use crate::state::replay::{HOST, Metric, Replay};
use crate::state::replay_trace::{Replayed, replay_trace};
use crate::state::stacks::Stacks;

/// The maximum number of rows that are shown without `--top`.
const MOST_ROWS: usize = 32;
/// Memory of other processes below this size is not reported. The value is half the size of a small CUDA
/// context.
const LEAST_UNNAMED: i64 = 128 << 20;

/// Follows the memory of a process on each GPU.
pub(super) struct DeviceUse {
    levels: Levels,
    /// For each device: the owner of the first memory that the process allocated there, and the first nonzero
    /// `stack_id` among its allocations there.
    first: FxHashMap<i32, (Owner, i64)>,
}

impl DeviceUse {
    pub(super) fn new(options: &Options) -> DeviceUse {
        DeviceUse { levels: Levels::new(options.device), first: FxHashMap::default() }
    }

    /// Processes a row, with its `stack_id`, after the replay has processed it.
    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        self.levels.feed(row, replay);
        if row.event == EventName::Mark && *replay.symbols.get(row.api) == *Api::FirstUse.as_str() {
            if let Some(FirstUse { device }) = FirstUse::parse(&replay.symbols.get(row.name)) {
                self.first.insert(device, (Owner::of(row), row.stack_id));
            }
            return;
        }
        let allocates =
            matches!(MemoryKind::of(row.event), Some((MemoryKind::Block | MemoryKind::External, _)));
        if allocates && row.device != HOST && row.delta_bytes > 0 {
            let first = self.first.entry(row.device).or_insert((Owner::of(row), row.stack_id));
            if first.1 == 0 {
                first.1 = row.stack_id;
            }
        }
    }

    /// The use of each GPU by the process of `trace`, which is one of `input`.
    pub(super) fn users(self, trace: &TraceFile, input: &Input, replayed: &Replayed) -> Vec<DeviceUser> {
        let stacks = Stacks::read(trace);
        let most = self.levels.devices.iter().max_by_key(|device| device.highest.reserved);
        let Some(home) = most.map(|device| device.ordinal) else { return Vec::new() };
        let of_context = |(ordinal, context, others): (i32, i64, i64)| {
            (ordinal, Level { context, outside: context + others, others, ..Level::default() })
        };
        let contexts = replayed.replay.contexts().map(of_context);
        let levels = self.levels.devices.iter().map(|device| (device.ordinal, device.highest));
        let user = |(device, level): (i32, Level)| {
            let (owner, stack) = self.first.get(&device).copied().unzip();
            let op = owner.map_or_else(String::new, |owner| replayed.symbols.or_dash(owner.op));
            DeviceUser {
                host: trace.meta.host.clone(),
                device,
                sees_all: trace.meta.devices.len() > 1 || trace.meta.world_size <= 1,
                rank: trace.meta.rank,
                pid: trace.pid(),
                parent: parent(trace, input).map(TraceFile::pid),
                name: process_name(trace, input),
                is_home: home == device,
                level,
                op,
                call: stack.and_then(|stack| FirstCall::read(&stacks, stack)),
            }
        };
        let has_memory = |user: &DeviceUser| user.bytes() > 0;
        levels.chain(contexts).map(user).filter(has_memory).collect()
    }
}

/// Reads the use of each GPU by every process of a run.
pub(super) fn read_users(input: &Input, options: &Options) -> Result<Vec<DeviceUser>> {
    let mut users = Vec::new();
    for trace in &input.traces {
        let mut device_use = DeviceUse::new(options);
        let known = KnownCategories::default();
        let columns = Columns::of(&["stack_id"]);
        let replayed = replay_trace(trace, columns, options, Metric::Allocated, known, |row, replay| {
            device_use.feed(row, replay);
        })?;
        users.extend(device_use.users(trace, input, &replayed));
    }
    find_homes(&mut users);
    Ok(users)
}

/// Corrects the home of worker processes once all users are known: it is the home of their parents.
pub(super) fn find_homes(users: &mut [DeviceUser]) {
    let key = |user: &DeviceUser| (user.host.clone(), user.pid.clone());
    let homes: FxHashMap<(String, String), i32> =
        users.iter().filter(|user| user.is_home).map(|user| (key(user), user.device)).collect();
    for user in users.iter_mut().filter(|user| user.sees_all) {
        let Some(parent) = &user.parent else { continue };
        if let Some(home) = homes.get(&(user.host.clone(), parent.clone())) {
            user.is_home = *home == user.device;
        }
    }
}

/// A process that has memory on a GPU. Sizes are in bytes, at the moment when the process used the most
/// memory there.
pub(super) struct DeviceUser {
    host: String,
    device: i32,
    /// False if the process is one of several ranks and sees only one GPU, so that its ordinal does not
    /// identify the GPU.
    sees_all: bool,
    rank: i32,
    pid: String,
    /// The id of its nearest ancestor with a trace in the run; `None` if there is no such ancestor.
    parent: Option<String>,
    /// The name of the process, with its pid.
    name: String,
    /// True if this is the GPU on which the process reserved the most memory. If the process has a `parent`,
    /// the parent's GPU counts instead.
    is_home: bool,
    level: Level,
    /// The op of the first allocation on this GPU.
    op: String,
    /// The call that put the process there; `None` if the trace has no Python lines of it.
    call: Option<FirstCall>,
}

impl DeviceUser {
    fn bytes(&self) -> i64 {
        self.level.used() - self.level.others
    }

    fn libraries(&self) -> i64 {
        (self.level.outside - self.level.others - self.level.context).max(0)
    }

    /// The place of the first use: the call and line of Python, or the op.
    fn first(&self) -> String {
        self.call.as_ref().map_or_else(|| self.op.clone(), FirstCall::text)
    }

    /// The remedy, if the process works on another GPU.
    fn remedy(&self) -> Option<&'static str> {
        let remedy = self.call.as_ref().map_or(UNKNOWN_CALL, |call| call.remedy);
        (!self.is_home).then_some(remedy)
    }

    fn json(&self) -> Value {
        let call = self.call.as_ref();
        json!({
            "host": self.host, "device": self.device, "rank": self.rank, "pid": self.pid, "process": self.name, "works_here": self.is_home,
            "context_bytes": self.level.context, "allocated_bytes": self.level.allocated,
            "reserved_bytes": self.level.reserved, "library_bytes": self.libraries(), "bytes": self.bytes(),
            "first_op": self.op, "first_line": call.map(|call| &call.line), "first_call": call.map(|call| call.what),
            "remedy": self.remedy(),
        })
    }
}

/// Memory of other processes on a GPU that the traces of the run do not explain, in bytes.
pub(super) struct Unnamed {
    host: String,
    device: i32,
    bytes: i64,
}

/// Returns the memory on each GPU that no trace of the run explains, according to a process that mainly works
/// on the GPU. In a run of several processes, this memory may still belong to them, because a context that
/// allocates nothing has no row in a trace.
pub(super) fn unnamed(users: &[DeviceUser]) -> Vec<Unnamed> {
    let mut all: Vec<Unnamed> = Vec::new();
    for user in users.iter().filter(|user| user.is_home && user.level.others >= LEAST_UNNAMED) {
        let same = users.iter().filter(|other| other.device == user.device && other.host == user.host);
        let named: i64 = same.filter(|other| other.pid != user.pid).map(DeviceUser::bytes).sum();
        let bytes = user.level.others - named;
        let is_known = all.iter().any(|known| known.device == user.device && known.host == user.host);
        if bytes >= LEAST_UNNAMED && !is_known && users.iter().any(|other| other.pid != user.pid) {
            all.push(Unnamed { host: user.host.clone(), device: user.device, bytes });
        }
    }
    all.sort_by(|a, b| (&a.host, a.device).cmp(&(&b.host, b.device)));
    all
}

/// Prints the memory of other processes that no trace of the run explains.
pub(super) fn print_unnamed(all: &[Unnamed], printer: &mut Printer, options: &Options) {
    for Unnamed { host, device, bytes } in all.iter().take(options.top.unwrap_or(MOST_ROWS)) {
        printer.plain(format!(
            "GPU {device} of {host}: {} belong to processes without a trace in this run, or to contexts that other \
             ranks created there (mem_get_info(0) or empty_cache() before set_device); nvidia-smi lists their pids",
            options.units.show(*bytes)
        ));
    }
}

/// Returns the result of [`unnamed`] as JSON.
pub(super) fn unnamed_json(all: &[Unnamed]) -> Value {
    all.iter().map(|it| json!({ "host": it.host, "device": it.device, "bytes": it.bytes })).collect()
}

/// Returns the users of each GPU on which a process has memory although it works on another one. Empty if
/// each process uses its own GPU only.
pub(super) fn crowded(mut users: Vec<DeviceUser>) -> Vec<DeviceUser> {
    let crowded: Vec<(String, i32)> =
        users.iter().filter(|user| !user.is_home).map(|user| (user.host.clone(), user.device)).collect();
    users.retain(|user| crowded.iter().any(|(host, device)| (host, device) == (&user.host, &user.device)));
    users.sort_by(|a, b| (&a.host, a.device, a.rank, &a.pid).cmp(&(&b.host, b.device, b.rank, &b.pid)));
    users
}

/// Returns the users as JSON.
pub(super) fn to_json(users: &[DeviceUser]) -> Value {
    users.iter().map(DeviceUser::json).collect()
}

/// The processes of a run that have memory on the GPU of another one of its processes.
#[derive(Clone, Debug)]
pub(super) struct Neighbours {
    /// Their names, each with its bytes and the call that put it there if it works on another GPU.
    pub(super) text: String,
    pub(super) remedy: &'static str,
}

/// The maximum number of neighbours that are named.
const MOST_NAMED: usize = 4;

/// Names the other processes of the run on the GPU `device` of the process of `trace`, those that mainly work
/// on another GPU first. `others` has the bytes of all other processes there. Returns `None` if no other
/// process of the run has memory there.
pub(super) fn neighbours(
    users: &[DeviceUser],
    trace: &TraceFile,
    (device, others): (i32, i64),
    options: &Options,
) -> Option<Neighbours> {
    let pid = trace.pid();
    let is_here = |user: &&DeviceUser| user.sees_all && user.device == device && user.host == trace.meta.host;
    let mut here: Vec<&DeviceUser> = users.iter().filter(is_here).collect();
    here.iter().find(|user| user.pid == pid)?;
    here.retain(|user| user.pid != pid);
    here.sort_by(|a, b| (a.is_home, -a.bytes(), &a.pid).cmp(&(b.is_home, -b.bytes(), &b.pid)));
    let named = |user: &&DeviceUser| {
        let mut text = format!("{}, {}", user.name, options.units.show(user.bytes()));
        if !user.is_home && !user.first().is_empty() {
            text.push_str(&format!(" by {}", user.first()));
        }
        text
    };
    let mut names: Vec<String> = here.iter().take(MOST_NAMED).map(named).collect();
    let remedy = here.first()?.remedy().unwrap_or(ONE_EACH);
    if here.len() > names.len() {
        names.push(format!("{} more", here.len() - names.len()));
    }
    let rest = others - here.iter().map(|user| user.bytes()).sum::<i64>();
    if rest >= LEAST_UNNAMED {
        names.push(format!("{} of processes without a trace in this run", options.units.show(rest)));
    }
    Some(Neighbours { text: names.join("; "), remedy })
}

/// The remedy where several processes of a run work on the same GPU.
const ONE_EACH: &str =
    "a GPU for each process, or fewer processes: each has a context, a cache and a model of its own";

/// Prints the users of crowded GPUs and a remedy. Prints nothing if every process works only on its own GPU.
pub(super) fn print(users: &[DeviceUser], printer: &mut Printer, options: &Options) {
    let foreign: Vec<&DeviceUser> = users.iter().filter(|user| !user.is_home).collect();
    if foreign.is_empty() {
        return;
    }
    let sum: i64 = foreign.iter().map(|user| user.bytes()).sum();
    let units = options.units;
    printer.line([
        Cell::new(format!("{} on GPUs where their processes do not work", units.show(sum)), Style::Alarm),
        ":".into(),
    ]);
    let many_hosts = users.iter().any(|user| user.host != users[0].host);
    let mut table = Table::new(&[
        ("GPU", Side::Left),
        ("process", Side::Left),
        ("total", Side::Right),
        ("context", Side::Right),
        ("allocated", Side::Right),
        ("reserved", Side::Right),
        ("libraries", Side::Right),
        ("", Side::Left),
        ("first memory", Side::Left),
    ]);
    for user in users.iter().take(options.top.unwrap_or(MOST_ROWS)) {
        let show = |bytes: i64| units.show(bytes).to_string();
        let style = if user.is_home { Style::Plain } else { Style::Strong };
        let gpu = if many_hosts { format!("{} {}", user.host, user.device) } else { user.device.to_string() };
        table.row([
            gpu.into(),
            user.name.as_str().into(),
            Cell::new(show(user.bytes()), style),
            show(user.level.context).into(),
            show(user.level.allocated).into(),
            show(user.level.reserved).into(),
            show(user.libraries()).into(),
            if user.is_home { "" } else { "works elsewhere" }.into(),
            if user.is_home { "-".to_owned() } else { user.first() }.into(),
        ]);
    }
    printer.table(&table);
    let mut remedies: Vec<&str> = foreign.iter().filter_map(|user| user.remedy()).collect();
    remedies.sort_unstable();
    remedies.dedup();
    for remedy in remedies {
        printer.line(["try: ".into(), Cell::new(remedy, Style::Command)]);
    }
}
