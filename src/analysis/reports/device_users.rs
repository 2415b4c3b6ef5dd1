//! The processes that have memory on each GPU, including processes that mainly work on another GPU.

use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use memtrace_trace::memory::MemoryKind;

use crate::options::Options;
use crate::read::record::Record;
use crate::read::stream::TraceFile;
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::block::Owner;
use crate::state::levels::{DeviceLevels, Level, Levels};
use crate::state::replay::{HOST, Replay};
use crate::state::replay_trace::Replayed;
use crate::state::stacks::Stacks;

/// The maximum number of rows that are shown without `--top`.
const MOST_ROWS: usize = 32;
/// Less memory of other processes is not reported. This is half of a small context.
const LEAST_UNNAMED: i64 = 128 << 20;

/// Follows the memory of a process on each GPU.
pub(super) struct DeviceUse {
    levels: Levels,
    /// For each device: the owner of its first memory, and the `stack_id` of the first that has one.
    first: FxHashMap<i32, (Owner, i64)>,
}

impl DeviceUse {
    pub(super) fn new(options: &Options) -> DeviceUse {
        DeviceUse { levels: Levels::new(options.device), first: FxHashMap::default() }
    }

    /// Takes a row, with its `stack_id`, after the replay took it.
    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        self.levels.feed(row, replay);
        let allocates =
            matches!(MemoryKind::of(row.event), Some((MemoryKind::Block | MemoryKind::External, _)));
        if allocates && row.device != HOST && row.delta_bytes > 0 {
            let first = self.first.entry(row.device).or_insert((Owner::of(row), row.stack_id));
            if first.1 == 0 {
                first.1 = row.stack_id;
            }
        }
    }

    /// The use of each GPU.
    pub(super) fn users(self, trace: &TraceFile, replayed: &Replayed) -> Vec<DeviceUser> {
        let stacks = Stacks::read(trace);
        let most = self.levels.devices.iter().max_by_key(|device| device.highest.reserved);
        let home = most.map(|device| device.ordinal);
        let user = |device: &DeviceLevels| {
            let (owner, stack) = self.first.get(&device.ordinal).copied().unzip();
            let op = owner.map_or_else(String::new, |owner| replayed.symbols.or_dash(owner.op));
            DeviceUser {
                host: trace.meta.host.clone(),
                device: device.ordinal,
                rank: trace.meta.rank,
                pid: trace.pid(),
                is_home: home == Some(device.ordinal),
                level: device.highest,
                op,
                line: stack.and_then(|stack| stacks.lines(stack).first().map(|line| (*line).to_owned())),
            }
        };
        let has_memory = |user: &DeviceUser| user.bytes() > 0;
        self.levels.devices.iter().map(user).filter(has_memory).collect()
    }
}

/// A process that has memory on a GPU; sizes are in bytes, at the moment when it had most there.
pub(super) struct DeviceUser {
    host: String,
    device: i32,
    rank: i32,
    pid: String,
    /// True if the process has most of its memory on this GPU.
    is_home: bool,
    level: Level,
    /// The op of its first memory there.
    op: String,
    /// The line of Python that allocated it.
    line: Option<String>,
}

impl DeviceUser {
    fn bytes(&self) -> i64 {
        self.level.used() - self.level.others
    }

    fn libraries(&self) -> i64 {
        (self.level.outside - self.level.others - self.level.context).max(0)
    }

    fn json(&self) -> Value {
        json!({
            "host": self.host, "device": self.device, "rank": self.rank, "pid": self.pid, "works_here": self.is_home,
            "context_bytes": self.level.context, "allocated_bytes": self.level.allocated,
            "reserved_bytes": self.level.reserved, "library_bytes": self.libraries(), "bytes": self.bytes(),
            "first_op": self.op, "first_line": self.line,
        })
    }
}

/// Memory of other processes on a GPU that the traces of the run do not explain, in bytes.
pub(super) struct Unnamed {
    host: String,
    device: i32,
    bytes: i64,
}

/// The memory on each GPU that no trace of the run explains, as seen by the process that works there. In a
/// run of several processes, it may still belong to them: a context without memory has no row in a trace.
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

/// The memory of [`unnamed`] as JSON.
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

/// The users as JSON.
pub(super) fn to_json(users: &[DeviceUser]) -> Value {
    users.iter().map(DeviceUser::json).collect()
}

/// Prints the users of crowded GPUs, and what to do.
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
        ("rank", Side::Right),
        ("pid", Side::Right),
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
            user.rank.to_string().into(),
            user.pid.as_str().into(),
            Cell::new(show(user.bytes()), style),
            show(user.level.context).into(),
            show(user.level.allocated).into(),
            show(user.level.reserved).into(),
            show(user.libraries()).into(),
            if user.is_home { "" } else { "works elsewhere" }.into(),
            if user.is_home { "-" } else { user.line.as_deref().unwrap_or(&user.op) }.into(),
        ]);
    }
    printer.table(&table);
    printer.line([
        "try: ".into(),
        Cell::new(
            "torch.cuda.set_device(local_rank) before the first call of CUDA; torch.load(..., map_location=\"cpu\"), for a \
             checkpoint goes back to the GPU that it was saved on",
            Style::Command,
        ),
    ]);
}
