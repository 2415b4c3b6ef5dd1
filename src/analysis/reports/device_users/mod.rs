//! The processes that have memory on each GPU, including processes that mainly work on another GPU.

mod first_call;
pub(super) mod other_processes;

use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use memtrace_trace::first_use::FirstUse;
use memtrace_trace::memory::MemoryKind;
use memtrace_trace::{Api, EventName};

use super::ledger::library;
use crate::error::Result;
use crate::options::Options;
use crate::read::input::Input;
use crate::read::record::{Columns, Record};
use crate::read::stream::TraceFile;
use crate::render::numbers::{percent, share};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::render::process_names::{parent, process_name};
use crate::state::block::Owner;
use crate::state::categories::KnownCategories;
use crate::state::levels::{Level, Levels};
use crate::state::replay::{Metric, Replay, is_gpu};
use crate::state::replay_trace::{Replayed, replay_trace};
use crate::state::stacks::Stacks;
use first_call::{FirstCall, UNKNOWN_CALL};
use other_processes::{OtherProcess, SeenProcesses};

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
    /// The live memory that NCCL took from CUDA: the device and the bytes, by `alloc_id`.
    live_nccl: FxHashMap<i64, (i32, i64)>,
    /// The live bytes of NCCL on each device, now and at most.
    nccl: FxHashMap<i32, (i64, i64)>,
    others: SeenProcesses,
}

/// The users of all GPUs of a run.
#[derive(Default)]
pub(super) struct RunUsers {
    /// The processes of the run.
    pub(super) users: Vec<DeviceUser>,
    /// The processes without a trace in the run, once for each process that saw them.
    pub(super) others: Vec<OtherProcess>,
}

impl DeviceUse {
    /// The columns that [`DeviceUse::feed`] needs.
    pub(super) const COLUMNS: Columns = Columns::of(&["ts_ns", "stack_id", "source", "name"]);

    pub(super) fn new(options: &Options) -> DeviceUse {
        DeviceUse {
            levels: Levels::new(options.device),
            first: FxHashMap::default(),
            live_nccl: FxHashMap::default(),
            nccl: FxHashMap::default(),
            others: SeenProcesses::default(),
        }
    }

    /// Processes a row, with its [`COLUMNS`](Self::COLUMNS), after the replay has processed it.
    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        self.levels.feed(row, replay);
        self.others.feed(row, &replay.symbols);
        self.feed_nccl(row, replay);
        if row.event == EventName::Mark && *replay.symbols.get(row.api) == *Api::FirstUse.as_str() {
            if let Some(FirstUse { device }) = FirstUse::parse(&replay.symbols.get(row.name)) {
                self.first.insert(device, (Owner::from_row(row), row.stack_id));
            }
            return;
        }
        let allocates =
            matches!(MemoryKind::changed_by(row.event), Some((MemoryKind::Block | MemoryKind::External, _)));
        if allocates && is_gpu(row.device) && row.delta_bytes > 0 {
            let first = self.first.entry(row.device).or_insert((Owner::from_row(row), row.stack_id));
            if first.1 == 0 {
                first.1 = row.stack_id;
            }
        }
    }

    fn feed_nccl(&mut self, row: &Record, replay: &Replay) {
        let (device, change) = match row.event {
            EventName::ExtAlloc if library(&replay.symbols.get(row.source)) == "NCCL" => {
                self.live_nccl.insert(row.alloc_id, (row.device, row.delta_bytes));
                (row.device, row.delta_bytes)
            }
            EventName::ExtFree if !replay.live().contains(row.alloc_id) => {
                let Some((device, bytes)) = self.live_nccl.remove(&row.alloc_id) else { return };
                (device, -bytes)
            }
            _ => return,
        };
        let (now, most) = self.nccl.entry(device).or_default();
        *now = now.saturating_add(change);
        *most = (*most).max(*now);
    }

    /// Adds the use of each GPU by the process of `trace`, which is one of `input`, to `all`.
    pub(super) fn add_to(self, all: &mut RunUsers, trace: &TraceFile, input: &Input, replayed: &Replayed) {
        all.users.extend(self.users(trace, input, replayed));
        all.others.extend(self.others.others(trace, input));
    }

    fn users(&self, trace: &TraceFile, input: &Input, replayed: &Replayed) -> Vec<DeviceUser> {
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
                nccl: self.nccl.get(&device).map_or(0, |(_, most)| *most),
                op,
                call: stack.and_then(|stack| FirstCall::read(&stacks, stack)),
            }
        };
        let has_memory = |user: &DeviceUser| user.bytes() > 0;
        levels.chain(contexts).map(user).filter(has_memory).collect()
    }
}

/// Returns the memory of every process of a run on each GPU, with the home of each process.
///
/// A run of one process has no users besides this process, so only the marks about other processes are read.
pub(super) fn read_users(input: &Input, options: &Options) -> Result<RunUsers> {
    let mut all = RunUsers::default();
    if let [trace] = &input.traces[..] {
        all.others = SeenProcesses::read(trace, options)?.others(trace, input);
        return Ok(all);
    }
    for trace in &input.traces {
        let mut device_use = DeviceUse::new(options);
        let known = KnownCategories::default();
        let columns = DeviceUse::COLUMNS;
        let replayed = replay_trace(trace, columns, options, Metric::Allocated, known, |row, replay| {
            device_use.feed(row, replay);
        })?;
        device_use.add_to(&mut all, trace, input, &replayed);
    }
    find_homes(&mut all.users);
    Ok(all)
}

/// Corrects the homes once all users are known. The home of a worker process is the home of its parent. A
/// process that spreads its model over several GPUs has a home on each of them.
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
    let gpus: Vec<Gpu> = users.iter().filter(|user| user.is_home).map(DeviceUser::gpu).collect();
    for user in users.iter_mut().filter(|user| user.parent.is_none() && user.level.reserved > 0) {
        user.is_home |= !gpus.contains(&user.gpu());
    }
}

/// A GPU: the host, the CUDA ordinal, and the process id if only this process gives the GPU that ordinal.
type Gpu = (String, i32, Option<String>);

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
    /// The id of the nearest ancestor process that has a trace in the run; `None` if there is no such
    /// ancestor.
    parent: Option<String>,
    /// The name of the process, with its pid.
    name: String,
    /// True if `device` is the home of the process: the GPU on which it reserved the most memory. The home of
    /// a process with a `parent` is the home of the parent.
    is_home: bool,
    level: Level,
    /// Of the memory outside PyTorch, the most that NCCL took.
    nccl: i64,
    /// The op of the first allocation on this GPU.
    op: String,
    /// The call with which the process first used this GPU; `None` if the trace has no Python lines of the
    /// call.
    call: Option<FirstCall>,
}

impl DeviceUser {
    fn bytes(&self) -> i64 {
        self.level.used() - self.level.others
    }

    /// The memory of libraries, including NCCL.
    fn libraries(&self) -> i64 {
        (self.level.outside - self.level.others - self.level.context).max(0)
    }

    fn nccl(&self) -> i64 {
        self.nccl.min(self.libraries())
    }

    fn gpu(&self) -> Gpu {
        (self.host.clone(), self.device, (!self.sees_all).then(|| self.pid.clone()))
    }

    /// Returns the first use of the GPU as text: the call and its Python line or, if they are unknown, the
    /// op.
    fn first(&self) -> String {
        self.call.as_ref().map_or_else(|| self.op.clone(), FirstCall::text)
    }

    /// Returns the remedy, or `None` if this GPU is the home of the process.
    fn remedy(&self) -> Option<&'static str> {
        let remedy = self.call.as_ref().map_or(UNKNOWN_CALL, |call| call.remedy);
        (!self.is_home).then_some(remedy)
    }

    fn json(&self) -> Value {
        let call = self.call.as_ref();
        json!({
            "host": self.host, "device": self.device, "rank": self.rank, "pid": self.pid, "process": self.name, "works_here": self.is_home,
            "context_bytes": self.level.context, "allocated_bytes": self.level.allocated,
            "reserved_bytes": self.level.reserved, "library_bytes": self.libraries(),
            "nccl_bytes": self.nccl(), "bytes": self.bytes(),
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

/// Returns the memory on each GPU that no trace of the run explains, as the process with its home on that GPU
/// measured it. The memory may still belong to processes of the run, because a context that allocates nothing
/// has no row in a trace.
pub(super) fn unnamed(RunUsers { users, others }: &RunUsers) -> Vec<Unnamed> {
    let mut all: Vec<Unnamed> = Vec::new();
    for user in users.iter().filter(|user| user.is_home && user.level.others >= LEAST_UNNAMED) {
        let same = users.iter().filter(|other| other.device == user.device && other.host == user.host);
        let named: i64 = same.filter(|other| other.pid != user.pid).map(DeviceUser::bytes).sum();
        let seen = others.iter().filter(|other| other.seen_by == user.pid && other.device() == user.device);
        let seen: i64 = seen.filter_map(|other| other.bytes_at(user.level.ts_ns)).sum();
        let bytes = user.level.others - named - seen;
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

/// Returns the users of each GPU on which a process has memory although it works on another one. Without such
/// a process, returns all users if the GPUs differ by more than one part in [`UNEVEN`] of the fullest one, and
/// no user otherwise.
pub(super) fn crowded(mut users: Vec<DeviceUser>) -> Vec<DeviceUser> {
    if users.iter().any(|user| !user.is_home) || !is_uneven_run(&users) {
        let crowded: Vec<Gpu> = users.iter().filter(|user| !user.is_home).map(DeviceUser::gpu).collect();
        users.retain(|user| crowded.contains(&user.gpu()));
    }
    users.sort_by(|a, b| (&a.host, a.device, a.rank, &a.pid).cmp(&(&b.host, b.device, b.rank, &b.pid)));
    users
}

/// GPUs and ranks are uneven if their memory differs by more than one part in this many of the fullest one.
pub(super) const UNEVEN: i64 = 20;

/// Returns true if the emptiest and the fullest, in bytes, are uneven.
pub(super) fn is_uneven(low: i64, high: i64) -> bool {
    (high - low).saturating_mul(UNEVEN) > high
}

fn is_uneven_run(users: &[DeviceUser]) -> bool {
    let (low, high) = range_of_gpus(users);
    is_uneven(low, high)
}

/// Returns the memory of the emptiest and of the fullest GPU on which a process of the run works.
fn range_of_gpus(users: &[DeviceUser]) -> (i64, i64) {
    let mut gpus: FxHashMap<Gpu, (i64, bool)> = FxHashMap::default();
    for user in users {
        let (bytes, is_home) = gpus.entry(user.gpu()).or_default();
        *bytes += user.bytes();
        *is_home |= user.is_home;
    }
    let homes = || gpus.values().filter(|(_, is_home)| *is_home).map(|(bytes, _)| *bytes);
    (homes().min().unwrap_or(0), homes().max().unwrap_or(0))
}

/// Returns the users as JSON.
pub(super) fn to_json(users: &[DeviceUser]) -> Value {
    users.iter().map(DeviceUser::json).collect()
}

/// The processes of a run that have memory on the GPU of another one of its processes.
#[derive(Clone, Debug)]
pub(super) struct Neighbours {
    /// The names of the processes, each with its bytes. A process with its home on another GPU also has the
    /// call with which it first used this one.
    pub(super) text: String,
    pub(super) remedy: &'static str,
}

/// The maximum number of neighbours that are named.
const MOST_NAMED: usize = 4;

/// The other processes on a GPU at a moment of a trace.
pub(super) struct OthersAt {
    pub(super) device: i32,
    pub(super) ts_ns: i64,
    /// The memory of all other processes.
    pub(super) bytes: i64,
}

/// Names the other processes on a GPU that the process of `trace` uses. Processes of the run that mainly work
/// on another GPU come first, and processes without a trace in the run come last. Returns `None` if no process
/// is known.
pub(super) fn neighbours(
    RunUsers { users, others }: &RunUsers,
    trace: &TraceFile,
    at: &OthersAt,
    options: &Options,
) -> Option<Neighbours> {
    let pid = trace.pid();
    let is_here =
        |user: &&DeviceUser| user.sees_all && user.device == at.device && user.host == trace.meta.host;
    let mut here: Vec<&DeviceUser> = users.iter().filter(is_here).collect();
    if here.iter().any(|user| user.pid == pid) {
        here.retain(|user| user.pid != pid);
    } else {
        here.clear();
    }
    here.sort_by(|a, b| (a.is_home, -a.bytes(), &a.pid).cmp(&(b.is_home, -b.bytes(), &b.pid)));
    let named = |user: &&DeviceUser| {
        let mut text = format!("{}, {}", user.name, options.units.show(user.bytes()));
        if !user.is_home && !user.first().is_empty() {
            text.push_str(&format!(" by {}", user.first()));
        }
        text
    };
    let mut strange: Vec<(&OtherProcess, Option<i64>)> = others
        .iter()
        .filter(|other| other.seen_by == pid && other.host == trace.meta.host && other.device() == at.device)
        .filter(|other| other.is_there_at(at.ts_ns))
        .map(|other| (other, other.bytes_at(at.ts_ns)))
        .collect();
    strange.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let remedy = match here.first() {
        Some(first) => first.remedy().unwrap_or(ONE_EACH),
        None => strange.first().map(|_| other_processes::END_THEM)?,
    };
    let all = here.len() + strange.len();
    let strangers = strange.iter().map(|(other, bytes)| other.text(*bytes, options));
    let mut names: Vec<String> = here.iter().map(named).chain(strangers).take(MOST_NAMED).collect();
    if all > names.len() {
        names.push(format!("{} more", all - names.len()));
    }
    let known: i64 = here.iter().map(|user| user.bytes()).sum();
    let rest = at.bytes - known - strange.iter().filter_map(|(_, bytes)| *bytes).sum::<i64>();
    if rest >= LEAST_UNNAMED {
        names.push(format!("{} of processes without a trace in this run", options.units.show(rest)));
    }
    Some(Neighbours { text: names.join("; "), remedy })
}

/// The remedy where several processes of a run work on the same GPU.
const ONE_EACH: &str = "a GPU for each process, or end one that is not needed now: each has a context, a cache and a model of its own";

/// Prints the result of [`crowded`] as a table of GPUs by process, and a remedy for each process that works on
/// another GPU.
pub(super) fn print(users: &[DeviceUser], printer: &mut Printer, options: &Options) {
    let foreign: Vec<&DeviceUser> = users.iter().filter(|user| !user.is_home).collect();
    let units = options.units;
    if !foreign.is_empty() {
        let sum: i64 = foreign.iter().map(|user| user.bytes()).sum();
        printer.line([
            Cell::new(
                format!("{} on GPUs that their processes do not work on", units.show(sum)),
                Style::Alarm,
            ),
            ":".into(),
        ]);
    } else if !users.is_empty() {
        let (low, high) = range_of_gpus(users);
        printer.plain(format!(
            "the fullest GPU has {} more of this run than the emptiest ({} of the fullest):",
            units.show(high - low),
            percent(share(high - low, high))
        ));
    }
    print_table(users, printer, options);
    let mut remedies: Vec<&str> = foreign.iter().filter_map(|user| user.remedy()).collect();
    remedies.sort_unstable();
    remedies.dedup();
    for remedy in remedies {
        printer.line(["try: ".into(), Cell::new(remedy, Style::Command)]);
    }
}

fn print_table(users: &[DeviceUser], printer: &mut Printer, options: &Options) {
    if users.is_empty() {
        return;
    }
    let many_hosts = users.iter().any(|user| user.host != users[0].host);
    let has_foreign = users.iter().any(|user| !user.is_home);
    let mut table = Table::new(&[
        ("GPU", Side::Left),
        ("process", Side::Left),
        ("total", Side::Right),
        ("context", Side::Right),
        ("allocated", Side::Right),
        ("reserved", Side::Right),
        ("NCCL", Side::Right),
        ("other libraries", Side::Right),
        ("", Side::Left),
        (if has_foreign { "first memory" } else { "" }, Side::Left),
    ]);
    for user in users.iter().take(options.top.unwrap_or(MOST_ROWS)) {
        let show = |bytes: i64| options.units.show(bytes).to_string();
        let style = if user.is_home { Style::Plain } else { Style::Strong };
        let gpu = if many_hosts { format!("{} {}", user.host, user.device) } else { user.device.to_string() };
        let first = match (user.is_home, has_foreign) {
            (false, _) => user.first(),
            (true, true) => "-".to_owned(),
            (true, false) => String::new(),
        };
        table.row([
            gpu.into(),
            user.name.as_str().into(),
            Cell::new(show(user.bytes()), style),
            show(user.level.context).into(),
            show(user.level.allocated).into(),
            show(user.level.reserved).into(),
            show(user.nccl()).into(),
            show(user.libraries() - user.nccl()).into(),
            if user.is_home { "" } else { "works elsewhere" }.into(),
            first.into(),
        ]);
    }
    printer.table(&table);
    printer.more(users.len().saturating_sub(options.top.unwrap_or(MOST_ROWS)), "");
}
