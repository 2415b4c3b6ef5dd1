//! The owner that a call stack names: the Python line, the op, the module, and the phase.

use std::io;

use memtrace_trace::stacks::{FrameKind, Stack, StackWriter};
use rustc_hash::FxHashMap;

use super::modules::{CallFrame, Modules};

/// The maximum number of frames of all stacks in [`StackTable::by_frames`] together.
const MOST_KNOWN: usize = 4 << 20;

/// The index of a stack; 0 means no stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StackId(pub(super) u32);

/// The owner that a stack names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StackOwner {
    /// The index of the frame with the op; 0 means no op.
    pub(super) op: u32,
    pub(super) phase: Option<Phase>,
    /// True for a forward pass inside a backward pass, which recomputes activations.
    pub(super) is_recomputed: bool,
    /// True if cuBLAS allocates a workspace.
    pub(super) is_workspace: bool,
    /// The index of the module; 0 means no module.
    pub(super) module: u32,
    /// The `stack_id` of the owner's rows.
    pub(super) stack: u32,
}

/// A phase that frames name. Of several phases in a stack, the last in this list counts: a forward pass
/// inside a backward pass is recomputation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Phase {
    Forward,
    Backward,
    Optimizer,
}

impl Phase {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Optimizer => "optimizer",
        }
    }
}

/// The parts of a frame that determine an owner.
#[derive(Clone, Debug, Default)]
struct KnownFrame {
    text: Box<str>,
    /// `None` for a frame that is neither an op nor a Python line.
    kind: Option<FrameKind>,
    phase: Option<Phase>,
    is_workspace: bool,
    place: CallFrame,
}

/// All frames and stacks of a snapshot.
#[derive(Debug)]
pub(super) struct StackTable {
    frames: Vec<KnownFrame>,
    by_text: FxHashMap<(FrameKind, Box<str>), u32>,
    stacks: Vec<StackOwner>,
    /// The stacks by their frames. A file repeats the stacks of a training loop in every step.
    by_frames: FxHashMap<Box<[u32]>, StackId>,
    /// The number of frames of these stacks together.
    known_frames: usize,
    /// The stacks of the rows, each stored as its parent stack and its innermost frame.
    nodes: Vec<(u32, u32)>,
    by_node: FxHashMap<(u32, u32), u32>,
    modules: Modules,
    /// True if any stack names an op.
    has_ops: bool,
}

/// The first frames of the table: the phase, and whether cuBLAS allocates a workspace. They have neither a
/// line nor an op. Frame 0 names nothing.
const PLAIN: [(Option<Phase>, bool); 3] = [(None, false), (Some(Phase::Backward), false), (None, true)];

impl Default for StackTable {
    fn default() -> Self {
        let plain = |(phase, is_workspace)| KnownFrame { phase, is_workspace, ..KnownFrame::default() };
        StackTable {
            frames: PLAIN.map(plain).to_vec(),
            by_text: FxHashMap::default(),
            stacks: vec![StackOwner::default()],
            by_frames: FxHashMap::default(),
            known_frames: 0,
            nodes: vec![(0, 0)],
            by_node: FxHashMap::default(),
            modules: Modules::default(),
            has_ops: false,
        }
    }
}

impl StackTable {
    /// Returns the index of a frame, after adding the frame if it is new. A frame that is neither an op nor a
    /// Python line is represented by the frame in [`PLAIN`] with the same phase.
    pub(super) fn frame(&mut self, name: &str, file: &str, line: i64) -> u32 {
        let phase = phase_of(name, file);
        let (kind, text) = if let Some(op) = op_of(name) {
            (FrameKind::Op, format!("aten::{op}"))
        } else if is_python(file) {
            (FrameKind::Python, format!("{file}:{line} {name}"))
        } else {
            let plain = (phase, is_workspace(name));
            return PLAIN.iter().position(|known| *known == plain).unwrap_or(0) as u32;
        };
        let frames = &mut self.frames;
        *self.by_text.entry((kind, text.into_boxed_str())).or_insert_with_key(|(kind, text)| {
            let place = if *kind == FrameKind::Python {
                CallFrame::from_frame(name, file, line)
            } else {
                CallFrame::Other
            };
            frames.push(KnownFrame {
                text: text.clone(),
                kind: Some(*kind),
                phase,
                is_workspace: false,
                place,
            });
            frames.len() as u32 - 1
        })
    }

    /// Returns the index of the stack with these frames, innermost first, after adding the stack if it is
    /// new.
    pub(super) fn stack(&mut self, frames: &[u32]) -> StackId {
        if let Some(known) = self.by_frames.get(frames) {
            return *known;
        }
        let stack = self.add_stack(frames);
        if self.known_frames + frames.len() <= MOST_KNOWN {
            self.known_frames += frames.len();
            self.by_frames.insert(frames.into(), stack);
        }
        stack
    }

    fn add_stack(&mut self, frames: &[u32]) -> StackId {
        let known = |frame: &u32| &self.frames[*frame as usize];
        let is_op = |frame: &&u32| known(frame).kind == Some(FrameKind::Op);
        let phase = frames.iter().filter_map(|frame| known(frame).phase).max();
        let first = |phase| frames.iter().position(|frame| known(frame).phase == Some(phase));
        let is_recomputed = match (first(Phase::Forward), first(Phase::Backward)) {
            (Some(forward), Some(backward)) => forward < backward,
            _ => false,
        };
        let is_workspace = frames.iter().any(|frame| known(frame).is_workspace);
        let module =
            self.modules.innermost(frames.iter().rev().map(|frame| &self.frames[*frame as usize].place));
        let op = frames.iter().find(is_op).copied().unwrap_or(0);
        let lines: Vec<u32> =
            frames.iter().copied().filter(|frame| known(frame).kind == Some(FrameKind::Python)).collect();
        let mut stack = 0;
        for frame in lines.into_iter().rev().chain((op != 0).then_some(op)) {
            let nodes = &mut self.nodes;
            stack = *self.by_node.entry((stack, frame)).or_insert_with(|| {
                nodes.push((stack, frame));
                nodes.len() as u32 - 1
            });
        }
        self.has_ops |= op != 0;
        self.stacks.push(StackOwner { op, phase, is_recomputed, is_workspace, module, stack });
        StackId(self.stacks.len() as u32 - 1)
    }

    /// Returns the owner that a stack names.
    pub(super) fn owner(&self, stack: StackId) -> StackOwner {
        self.stacks.get(stack.0 as usize).copied().unwrap_or_default()
    }

    /// Returns the op of an owner, or `None` if the owner's stack names no op.
    pub(super) fn op(&self, owner: StackOwner) -> Option<&str> {
        (owner.op != 0).then(|| &*self.frames[owner.op as usize].text)
    }

    /// Returns the module of an owner, or `None` if the owner's stack names no module.
    pub(super) fn module(&self, owner: StackOwner) -> Option<&str> {
        self.modules.path(owner.module)
    }

    /// Returns the number of modules.
    pub(super) fn module_count(&self) -> usize {
        self.modules.count()
    }

    /// Returns true if any stack names an op.
    pub(super) fn has_ops(&self) -> bool {
        self.has_ops
    }

    /// Returns true if any stack has a Python line or an op.
    pub(super) fn has_lines(&self) -> bool {
        self.nodes.len() > 1
    }

    /// Returns true if the id means "no stack".
    pub(super) fn is_empty(stack: StackId) -> bool {
        stack == StackId::default()
    }

    /// Returns the content of the `.stacks` file that belongs to the rows.
    pub(super) fn stacks_file(&self) -> io::Result<Vec<u8>> {
        let mut file = Vec::new();
        let mut writer = StackWriter::new(&mut file)?;
        for (id, (parent, frame)) in self.nodes.iter().enumerate().skip(1) {
            let frame = &self.frames[*frame as usize];
            let (kind, frames) = (frame.kind.unwrap_or_default(), vec![&*frame.text]);
            writer.write(&Stack { id: id as u32, parent: *parent, kind, frames })?;
        }
        writer.flush()?;
        drop(writer);
        Ok(file)
    }
}

/// The suffixes in names such as `empty_memory_format`, which name the overload and are not part of an op's
/// name.
const OVERLOADS: [&str; 12] = [
    "_memory_format",
    "_dim_IntList",
    "_Tensor_Scalar",
    "_Tensor_Tensor",
    "_Tensor_out",
    "_Scalar_out",
    "_Tensor",
    "_Scalar",
    "_input",
    "_dimname",
    "_int",
    "_out",
];

/// Returns the op of a C++ frame such as `at::_ops::mm::call(...)`.
fn op_of(name: &str) -> Option<&str> {
    let (op, rest) = name.strip_prefix("at::_ops::")?.split_once("::")?;
    let runs = rest.starts_with("call(") || rest.starts_with("redispatch(");
    let overload = OVERLOADS.iter().find_map(|overload| op.strip_suffix(overload));
    runs.then_some(overload.unwrap_or(op))
}

/// Returns true for a C++ frame in which PyTorch allocates a workspace of cuBLAS.
fn is_workspace(name: &str) -> bool {
    let name = name.strip_prefix("at::cuda::").unwrap_or_default();
    name.contains("CUDABlasHandle") || name.contains("Workspace")
}

fn is_python(file: &str) -> bool {
    file.ends_with(".py") || file.starts_with('<')
}

fn phase_of(name: &str, file: &str) -> Option<Phase> {
    if !is_python(file) {
        return name.starts_with("torch::autograd::Engine::").then_some(Phase::Backward);
    }
    // Python 3.11 and later may provide the qualified name.
    let name = name.rsplit('.').next().unwrap_or(name);
    // A function of `torch.nn.functional` outside every module mostly computes the loss.
    let is_call = file.ends_with("torch/nn/modules/module.py") && name == "_call_impl"
        || file.ends_with("torch/nn/functional.py");
    let is_backward = file.ends_with("torch/autograd/graph.py") && name == "_engine_run_backward"
        || file.ends_with("torch/autograd/__init__.py") && name == "backward";
    if file.contains("/torch/optim/") {
        Some(Phase::Optimizer)
    } else if is_backward {
        Some(Phase::Backward)
    } else {
        is_call.then_some(Phase::Forward)
    }
}
