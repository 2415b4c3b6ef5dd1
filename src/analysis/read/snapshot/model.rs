//! The content of a memory snapshot: segments with blocks, events, and the owners that its frames name.

use std::io::{BufReader, Read};
use std::ops::Range;

use memtrace_trace::columns::{MAX_BYTES, MAX_DEVICE, MAX_NUMBER};

use super::owners::{Phase, StackId, StackTable};
use super::pickle::{self, Fold, Folded, Value, Values};

/// The maximum number of frames of one stack.
const DEEPEST_STACK: usize = 10_000;
/// The maximum number of events. A compressed file may be small and have any number of them.
const MOST_EVENTS: usize = 1 << 26;

/// A snapshot.
#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) segments: Vec<SnapshotSegment>,
    /// The events of all devices.
    events: Vec<Event>,
    /// The events of each device, oldest first.
    by_device: Vec<Range<u32>>,
    pub(super) owners: StackTable,
    pub(super) settings: Settings,
    /// The times in microseconds at which a step of an optimizer ended, in order.
    pub(super) step_ends: Vec<i64>,
    /// True if the events have no times. Their times are then their numbers.
    pub(super) has_no_times: bool,
    /// The number of events with an action that is not known here.
    pub(super) unknown_actions: usize,
    /// True if an allocation in the history has a stack.
    has_event_stacks: bool,
    /// The ids of the private pools. Pool 1 is the first of them.
    pools: Vec<(i64, i64)>,
}

/// The settings of the allocator.
#[derive(Debug, Default)]
pub(super) struct Settings {
    /// The text of `PYTORCH_CUDA_ALLOC_CONF`.
    pub(super) conf: String,
    /// Blocks of at least this many bytes are not split; 0 means no limit.
    pub(super) max_split: i64,
}

/// A segment at the time of the snapshot.
#[derive(Clone, Debug, Default)]
pub(super) struct SnapshotSegment {
    pub(super) device: i32,
    pub(super) addr: i64,
    pub(super) bytes: i64,
    pub(super) stream: i64,
    pub(super) pool: i64,
    pub(super) expandable: bool,
    pub(super) stack: StackId,
    pub(super) blocks: Vec<SnapshotBlock>,
    /// True if `allocated_size` and `active_size` in the file are the sums over the blocks.
    pub(super) has_right_sums: bool,
}

/// A block at the time of the snapshot.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SnapshotBlock {
    pub(super) addr: i64,
    pub(super) bytes: i64,
    pub(super) requested: i64,
    pub(super) state: BlockState,
    pub(super) stack: StackId,
}

/// The state of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum BlockState {
    #[default]
    Free,
    /// The program uses the block.
    Allocated,
    /// The program freed the block, and a stream still uses it.
    Pending,
}

/// An event of the history.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    pub(super) action: Action,
    /// The address or, for an OOM, the free memory of the device.
    pub(super) addr: i64,
    pub(super) bytes: i64,
    pub(super) stream: i64,
    pub(super) time_us: i64,
    pub(super) stack: StackId,
}

/// The action of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Alloc,
    FreeRequested,
    FreeCompleted,
    SegmentAlloc,
    SegmentFree,
    SegmentMap,
    SegmentUnmap,
    Oom,
    Snapshot,
    Unknown,
}

impl SnapshotSegment {
    /// Returns the address of the segment's end.
    pub(super) fn end(&self) -> i64 {
        self.addr.saturating_add(self.bytes)
    }
}

impl Model {
    /// Reads a snapshot.
    pub(super) fn read(file: impl Read) -> Result<Model, String> {
        let mut folder = Folder::default();
        let (top, values) = pickle::read(BufReader::with_capacity(1 << 20, file), &mut folder)?;
        let list = |what| values.get(top, what).and_then(|value| values.list(value));
        let needed = |what| list(what).ok_or_else(|| format!("it has no list {what:?}"));
        // The value of `torch.cuda.memory_snapshot()` is the list of segments alone.
        let alone = values.list(top).filter(|segments| !segments.is_empty());
        let mut segments = Vec::new();
        for segment in alone.map_or_else(|| needed("segments"), Ok)? {
            let number =
                Values::folded(*segment, Folded::Segment).ok_or("a segment has no size or blocks")?;
            let segment = folder.segments.get_mut(number as usize).and_then(Option::take);
            segments.push(segment.ok_or("it lists a segment twice")?);
        }
        segments.sort_by_key(|segment: &SnapshotSegment| (segment.device, segment.addr));
        let overlap =
            |pair: &&[SnapshotSegment]| pair[0].device == pair[1].device && pair[0].end() > pair[1].addr;
        if let Some(pair) = segments.windows(2).find(overlap) {
            return Err(format!("its segments at {:#x} and {:#x} overlap", pair[0].addr, pair[1].addr));
        }
        let mut by_device = Vec::new();
        let traces = if alone.is_some() { &[] } else { needed("device_traces")? };
        if traces.len() > MAX_DEVICE as usize {
            return Err(format!("it has {} devices", traces.len()));
        }
        let mut seen = 0;
        for trace in traces {
            let events = values.events(*trace).ok_or("a history is not a list of events")?;
            if !events.is_empty() && events.start < seen {
                return Err("it lists an event twice".to_owned());
            }
            seen = seen.max(events.end);
            by_device.push(events);
        }
        let setting = |key| values.get(values.get(top, "allocator_settings")?, key);
        let text = |key| setting(key).and_then(|value| values.text(value)).map(str::to_owned);
        let settings = Settings {
            conf: text("PYTORCH_CUDA_ALLOC_CONF").or_else(|| text("PYTORCH_ALLOC_CONF")).unwrap_or_default(),
            max_split: match setting("max_split_size") {
                Some(Value::Int(bytes)) => bytes.max(0),
                _ => 0,
            },
        };
        let step_ends = step_ends(list("external_annotations").unwrap_or_default(), &values);
        let Folder { mut events, owners, pools, .. } = folder;
        let has_no_times = !events.is_empty() && events.iter().all(|event| event.time_us == 0);
        if has_no_times {
            for device in &by_device {
                let own = &mut events[device.start as usize..device.end as usize];
                own.iter_mut().zip(1..).for_each(|(event, number)| event.time_us = number);
            }
        }
        let has_event_stacks =
            events.iter().any(|event| event.action == Action::Alloc && !StackTable::is_empty(event.stack));
        let unknown_actions = events.iter().filter(|event| event.action == Action::Unknown).count();
        let mut model = Model {
            segments,
            events,
            by_device,
            owners,
            settings,
            step_ends,
            has_no_times,
            unknown_actions,
            has_event_stacks,
            pools,
        };
        if model.step_ends.is_empty() {
            model.step_ends = model.ends_of_optimizers();
        }
        Ok(model)
    }

    /// Returns the times of the last allocations of each optimizer step, for a file without annotations. A
    /// step ends when a forward or a backward follows the optimizer.
    fn ends_of_optimizers(&self) -> Vec<i64> {
        let devices = self.devices();
        let Some(most) = devices.into_iter().max_by_key(|device| self.events(*device).len()) else {
            return Vec::new();
        };
        let mut ends = Vec::new();
        let mut last = None;
        for event in self.events(most).iter().filter(|event| event.action == Action::Alloc) {
            match self.phase(event.stack) {
                Some(Phase::Optimizer) => last = Some(event.time_us),
                Some(Phase::Forward | Phase::Backward) => ends.extend(last.take()),
                None => {}
            }
        }
        ends.extend(last);
        ends
    }

    /// Returns the step of a time.
    pub(super) fn step_at(&self, time_us: i64) -> i64 {
        self.step_ends.partition_point(|end| *end < time_us) as i64
    }

    /// Returns the phase of an event with this stack. If stacks were recorded, memory without a stack was
    /// allocated by a thread without Python, which is a thread of autograd.
    pub(super) fn phase(&self, stack: StackId) -> Option<Phase> {
        if StackTable::is_empty(stack) && self.has_event_stacks {
            return Some(Phase::Backward);
        }
        self.owners.owner(stack).phase
    }

    /// Returns true if a private pool belongs to a captured CUDA graph. PyTorch creates the id (N, 0) for a
    /// graph and (0, N) for a pool of the program.
    pub(super) fn is_of_graph(&self, pool: i64) -> bool {
        pool.checked_sub(1).and_then(|at| self.pools.get(at as usize)).is_some_and(|(graph, _)| *graph != 0)
    }

    /// Returns the ordinals of the devices for which the file has segments or events.
    pub(super) fn devices(&self) -> Vec<i32> {
        let with_events = self.by_device.iter().enumerate().filter(|(_, events)| !events.is_empty());
        let mut devices: Vec<i32> = with_events.map(|(device, _)| device as i32).collect();
        devices.extend(self.segments.iter().map(|segment| segment.device));
        devices.sort_unstable();
        devices.dedup();
        devices
    }

    /// Returns the events of a device, oldest first.
    pub(super) fn events(&self, device: i32) -> &[Event] {
        let range = self.by_device.get(device as usize).cloned().unwrap_or_default();
        &self.events[range.start as usize..range.end as usize]
    }

    /// Returns the number of events of all devices.
    pub(super) fn event_count(&self) -> usize {
        self.events.len()
    }

    /// Returns the segments of a device by address.
    pub(super) fn segments(&self, device: i32) -> impl Iterator<Item = &SnapshotSegment> {
        self.segments.iter().filter(move |segment| segment.device == device)
    }
}

/// Returns the times at which a step ended, in order. If there are several optimizers, only the first counts.
fn step_ends(annotations: &[Value], values: &Values) -> Vec<i64> {
    let text = |annotation, key| values.get(annotation, key).and_then(|value| values.text(value));
    let is_end = |annotation: &&Value| {
        text(**annotation, "stage") == Some("END")
            && text(**annotation, "name").is_some_and(|name| name.starts_with("Optimizer.step#"))
    };
    let ends: Vec<Value> = annotations.iter().filter(is_end).copied().collect();
    let first = ends.first().and_then(|end| text(*end, "name"));
    let own = ends.iter().filter(|end| text(**end, "name") == first);
    let mut times: Vec<i64> = own
        .filter_map(|end| match values.get(*end, "time_us")? {
            Value::Int(time_us) => Some(time_us),
            _ => None,
        })
        .collect();
    times.sort_unstable();
    times
}

macro_rules! keys {
    ($($key:ident = $text:literal),+ $(,)?) => {
        /// The dict keys of a snapshot that are read.
        #[derive(Clone, Copy)]
        enum Key { $($key),+ }

        const KEYS: &[&str] = &[$($text),+];
    };
}

keys! {
    Action = "action",
    Addr = "addr",
    DeviceFree = "device_free",
    Size = "size",
    Stream = "stream",
    TimeUs = "time_us",
    Frames = "frames",
    Name = "name",
    Filename = "filename",
    Line = "line",
    Device = "device",
    Address = "address",
    TotalSize = "total_size",
    PoolId = "segment_pool_id",
    IsExpandable = "is_expandable",
    Blocks = "blocks",
    AllocatedSize = "allocated_size",
    ActiveSize = "active_size",
    RequestedSize = "requested_size",
    State = "state",
}

/// The values of a dict, indexed by `Key`. Values of unknown keys are left out.
struct Fields([Option<Value>; KEYS.len()]);

impl Fields {
    fn get(&self, key: Key) -> Option<Value> {
        self.0[key as usize]
    }

    /// Returns the number under a key, which must be between 0 and `most`.
    fn number(&self, key: Key, most: u64) -> Result<i64, String> {
        self.number_or(key, most, None)
    }

    fn number_or(&self, key: Key, most: u64, default: Option<i64>) -> Result<i64, String> {
        match (self.get(key), default) {
            (None, Some(default)) => Ok(default),
            (Some(Value::Int(number)), _) if number >= 0 && number as u64 <= most => Ok(number),
            (Some(Value::Int(number)), _) => {
                Err(format!("{:?} is out of range: {number}", KEYS[key as usize]))
            }
            _ => Err(format!("{:?} is not a number", KEYS[key as usize])),
        }
    }
}

#[derive(Default)]
struct Folder {
    /// For each text of the pickle that was looked up so far: the index of its key in [`KEYS`], or a larger
    /// number if the text is not a key.
    keys: Vec<u8>,
    segments: Vec<Option<SnapshotSegment>>,
    blocks: Vec<SnapshotBlock>,
    events: Vec<Event>,
    owners: StackTable,
    pools: Vec<(i64, i64)>,
    /// A buffer for the frames of one stack.
    frames: Vec<u32>,
}

impl Folder {
    fn fields(&mut self, dict: &[(u32, Value)], values: &Values) -> Fields {
        let mut fields = Fields([None; KEYS.len()]);
        for (key, value) in dict {
            for text in &values.texts[self.keys.len().min(values.texts.len())..] {
                let key = KEYS.iter().position(|key| *key == &**text).unwrap_or(KEYS.len());
                self.keys.push(key as u8);
            }
            if let Some(field) = fields.0.get_mut(usize::from(self.keys[*key as usize])) {
                *field = Some(*value);
            }
        }
        fields
    }

    fn stack(&mut self, fields: &Fields, values: &mut Values) -> Result<StackId, String> {
        let Some(value) = fields.get(Key::Frames) else { return Ok(StackId::default()) };
        if let Some(stack) = Values::folded(value, Folded::Stack) {
            return Ok(StackId(stack));
        }
        let list = values.list(value).ok_or("\"frames\" is not a list")?;
        if list.is_empty() {
            values.replace(value, Folded::Stack, 0);
            return Ok(StackId::default());
        }
        if list.len() > DEEPEST_STACK {
            return Err(format!("a stack has {} frames", list.len()));
        }
        let frame =
            |frame: &Value| Values::folded(*frame, Folded::Frame).ok_or("a frame has no file or line");
        self.frames.clear();
        for value in list {
            self.frames.push(frame(value)?);
        }
        let stack = self.owners.stack(&self.frames);
        values.replace(value, Folded::Stack, stack.0);
        Ok(stack)
    }

    fn event(&mut self, fields: &Fields, values: &mut Values) -> Result<u32, String> {
        let action = fields.get(Key::Action).and_then(|action| values.text(action));
        let action = match action.ok_or("\"action\" is not a string")? {
            "alloc" => Action::Alloc,
            "free_requested" => Action::FreeRequested,
            "free_completed" => Action::FreeCompleted,
            "segment_alloc" => Action::SegmentAlloc,
            "segment_free" => Action::SegmentFree,
            "segment_map" => Action::SegmentMap,
            "segment_unmap" => Action::SegmentUnmap,
            "oom" => Action::Oom,
            "snapshot" => Action::Snapshot,
            // Newer versions of torch may have further actions.
            _ => Action::Unknown,
        };
        let (addr, most) = match action {
            Action::Oom => (Key::DeviceFree, MAX_NUMBER),
            _ => (Key::Addr, MAX_BYTES),
        };
        let default = (action == Action::Unknown).then_some(0);
        let event = Event {
            action,
            addr: fields.number_or(addr, MAX_NUMBER, default)?,
            bytes: fields.number_or(Key::Size, most, default)?,
            stream: fields.number_or(Key::Stream, MAX_NUMBER, Some(0))?,
            time_us: fields.number_or(Key::TimeUs, MAX_NUMBER / 1000, Some(0))?,
            stack: self.stack(fields, values)?,
        };
        if self.events.len() == MOST_EVENTS {
            return Err(format!("it has more than {MOST_EVENTS} events"));
        }
        self.events.push(event);
        Ok(self.events.len() as u32 - 1)
    }

    fn block(&mut self, fields: &Fields, values: &mut Values) -> Result<u32, String> {
        let state = fields.get(Key::State).and_then(|state| values.text(state));
        let state = match state.ok_or("\"state\" is not a string")? {
            "active_allocated" => BlockState::Allocated,
            "active_pending_free" | "active_awaiting_free" => BlockState::Pending,
            "inactive" => BlockState::Free,
            other => return Err(format!("it has a block with an unknown state {other:?}")),
        };
        let bytes = fields.number(Key::Size, MAX_BYTES)?;
        let stack = self.stack(fields, values)?;
        self.blocks.push(SnapshotBlock {
            addr: fields.number_or(Key::Address, MAX_NUMBER, Some(-1))?,
            bytes,
            requested: fields.number_or(Key::RequestedSize, MAX_BYTES, Some(bytes))?,
            state,
            stack,
        });
        Ok(self.blocks.len() as u32 - 1)
    }

    fn segment(&mut self, fields: &Fields, values: &mut Values) -> Result<u32, String> {
        let mut segment = SnapshotSegment {
            device: fields.number_or(Key::Device, MAX_DEVICE - 1, Some(0))? as i32,
            addr: fields.number(Key::Address, MAX_NUMBER)?,
            bytes: fields.number(Key::TotalSize, MAX_BYTES)?,
            stream: fields.number_or(Key::Stream, MAX_NUMBER, Some(0))?,
            pool: self.pool(fields, values),
            expandable: fields.get(Key::IsExpandable) == Some(Value::Bool(true)),
            stack: self.stack(fields, values)?,
            blocks: Vec::new(),
            has_right_sums: true,
        };
        let blocks = fields.get(Key::Blocks).and_then(|blocks| values.list(blocks));
        let blocks = blocks.ok_or("\"blocks\" is not a list")?;
        let mut at = segment.addr;
        for block in blocks {
            let number = Values::folded(*block, Folded::Block).ok_or("a block has no state or size")?;
            let mut block = *self.blocks.get(number as usize).ok_or("it lists a block twice")?;
            // PyTorch before 2.2 writes no address.
            if block.addr < 0 {
                block.addr = at;
            }
            let inside = segment.addr.saturating_add(segment.bytes).saturating_sub(block.addr);
            if block.addr != at || block.bytes > inside || block.bytes == 0 {
                return Err(format!(
                    "the blocks of the segment at {:#x} overlap, leave a gap or are longer than it",
                    segment.addr
                ));
            }
            at += block.bytes;
            segment.blocks.push(block);
        }
        if at != segment.addr.saturating_add(segment.bytes) {
            return Err(format!("the blocks of the segment at {:#x} are shorter than it", segment.addr));
        }
        let sum = |is_of: fn(BlockState) -> bool| {
            segment.blocks.iter().filter(|block| is_of(block.state)).map(|block| block.bytes).sum::<i64>()
        };
        let allocated = sum(|state| state == BlockState::Allocated);
        let active = sum(|state| state != BlockState::Free);
        // The sums cannot overflow, because MAX_BYTES bounds the size of the segment.
        segment.has_right_sums = allocated
            == fields.number_or(Key::AllocatedSize, MAX_BYTES, Some(allocated))?
            && active == fields.number_or(Key::ActiveSize, MAX_BYTES, Some(active))?;
        self.segments.push(Some(segment));
        // In the pickle, the blocks of a segment directly precede the segment.
        self.blocks.clear();
        Ok(self.segments.len() as u32 - 1)
    }
}

impl Folder {
    /// Returns the number of a private pool, in the order of first use, or 0 for the default pool, whose id
    /// is (0, 0).
    fn pool(&mut self, fields: &Fields, values: &Values) -> i64 {
        let list = fields.get(Key::PoolId).and_then(|id| values.list(id)).unwrap_or_default();
        let [Value::Int(first), Value::Int(second)] = *list else { return 0 };
        if (first, second) == (0, 0) {
            return 0;
        }
        let pool = (first, second);
        let place = self.pools.iter().position(|known| *known == pool).unwrap_or_else(|| {
            self.pools.push(pool);
            self.pools.len() - 1
        });
        place as i64 + 1
    }
}

impl Fold for Folder {
    fn fold(&mut self, dict: &[(u32, Value)], values: &mut Values) -> Result<Option<(Folded, u32)>, String> {
        let fields = self.fields(dict, values);
        let has = |key| fields.get(key).is_some();
        Ok(if has(Key::Action) {
            Some((Folded::Event, self.event(&fields, values)?))
        } else if has(Key::TotalSize) && has(Key::Blocks) {
            Some((Folded::Segment, self.segment(&fields, values)?))
        } else if has(Key::State) && has(Key::Size) {
            Some((Folded::Block, self.block(&fields, values)?))
        } else if has(Key::Filename) && has(Key::Line) {
            let text = |key| fields.get(key).and_then(|value| values.text(value)).unwrap_or_default();
            let line = match fields.get(Key::Line) {
                Some(Value::Int(line)) => line,
                _ => 0,
            };
            Some((Folded::Frame, self.owners.frame(text(Key::Name), text(Key::Filename), line)))
        } else {
            None
        })
    }
}
