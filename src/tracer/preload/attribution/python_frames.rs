//! Reads the Python lines that made a call. With `MEMTRACE_STACKS=python`, this is done for allocations, for
//! the rows of ops, and for forward ops that may create a node of autograd's graph. Otherwise it is done only
//! at the first use of a device and for an allocation outside every op that may load data.
//!
//! torch's bindings release the GIL before they run an op, and a hook must not wait for the GIL. So a hook
//! cannot call a function of Python that changes reference counts or creates objects. But only a thread
//! itself changes its frames, and a running frame keeps its code alive, so a thread may read its own frames
//! without the GIL. Their layout differs between versions of Python (3.9 to 3.15). [`learn`] derives the
//! layout once, with the GIL held, from known frames. The layout is used only if every line that memtrace
//! then reads equals the line that Python reports. If the frames of an interpreter cannot be read, the trace
//! has no Python stacks. With `MEMTRACE_STACKS=python`, one line of the log reports this.

use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_record::intern::{Frame, StackId, TextId, with_tables};
use memtrace_record::per_thread::PerThread;
use memtrace_record::recorder::{stack_id, text_id};
use memtrace_trace::stacks::FrameKind;
use rustc_hash::FxHashMap;

use crate::attribution::detail;
use crate::ffi::cpython;
use crate::ffi::guarded_memory::GuardedMemory;

/// The layout of this interpreter's frames. Offsets are in words of 8 bytes, unless the documentation of a
/// field says bytes.
#[derive(Clone, Copy, Debug)]
struct FrameLayout {
    /// The word of the thread's state that points to its innermost frame, or to the struct of `through`.
    thread: usize,
    /// In 3.11 and 3.12, the word of `_PyCFrame` that points to the frame.
    through: Option<usize>,
    /// The words of a frame that point to its code and to the calling frame.
    code: usize,
    previous: usize,
    instruction: Instruction,
    /// The words of a code object that point to its file name, name and line table. They identify the code,
    /// because another code object may have the same address later.
    filename: usize,
    name: usize,
    lines: usize,
    /// The addresses of the types of code objects and of `str`.
    code_type: usize,
    text_type: usize,
}

/// The encoding of a frame's position in the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instruction {
    /// Python 3.11 and later: word `word` of the frame holds the address of the current instruction. `first`
    /// is the offset in bytes of the first instruction from the start of the code object.
    Address { word: usize, first: usize },
    /// A 32-bit instruction number at this byte offset, in units of `step` bytes (Python 3.9 and 3.10).
    Number { byte: usize, step: i32 },
}

/// The C functions of Python that read frames without changing a reference count.
#[derive(Clone, Copy)]
struct Functions {
    python: &'static cpython::Functions,
    this_thread: unsafe extern "C" fn() -> *const usize,
    line_of: unsafe extern "C" fn(*const usize, c_int) -> c_int,
    length_of: unsafe extern "C" fn(*const usize) -> isize,
    text_of: unsafe extern "C" fn(*const usize, *mut u32, isize, c_int) -> *mut u32,
}

impl Functions {
    fn find() -> Option<Functions> {
        let python = cpython::Functions::get()?;
        Some(Functions {
            python,
            this_thread: python.thread_state?,
            line_of: python.line_of_code?,
            length_of: python.text_length?,
            text_of: python.text_as_ucs4?,
        })
    }
}

/// The layout and the functions, which [`learn`] sets after it has checked the layout.
static LAYOUT: OnceLock<(FrameLayout, Functions)> = OnceLock::new();
/// True if [`LAYOUT`] is set and the run records Python stacks. A separate flag, because a hook can then
/// check both conditions by reading one atomic.
static IS_RECORDED: AtomicBool = AtomicBool::new(false);

/// A frame as Python describes it: the address of its code, the byte offset of its instruction, and its line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownFrame {
    pub(crate) code: usize,
    pub(crate) byte: usize,
    pub(crate) line: usize,
}

/// The known frames from which [`learn`] derives the layout, as addresses of Python objects.
pub(crate) struct KnownCode {
    /// The code of the calling frame.
    pub(crate) code: usize,
    /// The callers, innermost first. There are at least two, and each is at a different position in its code.
    pub(crate) callers: Vec<KnownFrame>,
    /// The addresses of the file name, the name and the line table in the code of the first caller.
    pub(crate) filename: usize,
    pub(crate) name: usize,
    pub(crate) lines: usize,
    /// The number of bytes from the start of a code object to its first instruction.
    pub(crate) code_size: usize,
}

/// The position in the code at which a frame runs, as it was read from the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FrameLine {
    code: usize,
    byte: i32,
    /// A hash of the words that identify the code.
    mark: u64,
}

/// The maximum number of frames read per stack, starting at the innermost.
const MAX_FRAMES: usize = 128;
/// The number of entries at which a thread's cache is cleared.
const CACHE_LIMIT: usize = 1 << 14;

/// This thread's cache of lines and stacks.
#[derive(Default)]
struct Cache {
    lines: FxHashMap<FrameLine, TextId>,
    stacks: FxHashMap<(u64, StackId), StackId>,
    walk: Vec<FrameLine>,
}

static CACHE: PerThread<RefCell<Cache>> = PerThread::new(RefCell::default);

/// Returns true if Python lines are recorded now.
#[inline]
pub(crate) fn are_recorded() -> bool {
    IS_RECORDED.load(Ordering::Relaxed) && detail::is_on()
}

/// Returns the address of this thread's innermost frame and its position in the code. Within one op, equal
/// results mean equal stacks. Returns zeros if the layout is unknown or the thread runs no Python.
#[inline]
pub(crate) fn innermost() -> (usize, usize) {
    let Some((layout, functions)) = LAYOUT.get() else { return (0, 0) };
    // SAFETY: the layout was learned from this interpreter.
    let frame = unsafe { first_frame(layout, functions) };
    if frame.is_null() {
        return (0, 0);
    }
    let at = match layout.instruction {
        // SAFETY: `frame` is a running frame of this thread, and the layout says that it has this word.
        Instruction::Address { word, .. } => unsafe { *frame.add(word) },
        // SAFETY: as above.
        Instruction::Number { byte, .. } => unsafe { frame.byte_add(byte).cast::<i32>().read() as usize },
    };
    (frame as usize, at)
}

/// Returns the file and the number of this thread's innermost line. Returns `None` if the thread runs no
/// Python or the layout is unknown.
pub(crate) fn innermost_line() -> Option<(String, i32)> {
    let (layout, functions) = LAYOUT.get()?;
    let mut walk = Vec::new();
    // SAFETY: the layout was learned from this interpreter, and the frames are this thread's own, which run.
    unsafe {
        read_frames(layout, first_frame(layout, functions), &mut walk);
        walk.iter()
            .find_map(|line| parts_of_line(layout, functions, line))
            .map(|(file, number, _)| (file, number))
    }
}

/// Returns this thread's innermost frame, or null if the thread runs no Python.
///
/// # Safety
/// `layout` is the frame layout of this interpreter.
unsafe fn first_frame(layout: &FrameLayout, functions: &Functions) -> *const usize {
    // An interpreter that shuts down frees the states of its threads.
    if !functions.python.is_running() {
        return std::ptr::null();
    }
    // SAFETY: the function only reads. It returns this thread's state, or null if the thread never ran
    // Python.
    let thread = unsafe { (functions.this_thread)() };
    if thread.is_null() {
        return thread;
    }
    // SAFETY: the state lives while the thread runs, and has this word by the contract.
    let mut place = unsafe { *thread.add(layout.thread) } as *const usize;
    if let Some(word) = layout.through
        && !place.is_null()
    {
        // SAFETY: the word points to the struct of `through`, by the contract.
        place = unsafe { *place.add(word) } as *const usize;
    }
    place
}

/// Returns this thread's Python lines as a stack on top of `base`, or `base` itself if the thread runs no
/// Python or the layout is unknown.
pub(crate) fn current(base: StackId) -> StackId {
    let Some((layout, functions)) = LAYOUT.get() else { return base };
    let stack = CACHE.with(|cache| {
        let mut cache = cache.try_borrow_mut().ok()?;
        let Cache { lines, stacks, walk } = &mut *cache;
        walk.clear();
        // SAFETY: the layout was learned from this interpreter, and the frames are this thread's own.
        unsafe { read_frames(layout, first_frame(layout, functions), walk) };
        let hash = walk.iter().fold(0, |hash, line| {
            mixed(mixed(hash, line.code as u64 ^ line.mark.rotate_left(20)), line.byte as u64)
        });
        if let Some(stack) = stacks.get(&(hash, base)) {
            return Some(*stack);
        }
        let mut stack = base;
        for line in walk.iter().rev() {
            if lines.len() >= CACHE_LIMIT {
                lines.clear();
            }
            // SAFETY: `line` was read from a frame that still runs.
            let text =
                *lines.entry(*line).or_insert_with(|| unsafe { text_of_line(layout, functions, line) });
            if text != 0 {
                stack = stack_id(Frame { parent: stack, text, kind: FrameKind::Python });
            }
        }
        if stacks.len() >= CACHE_LIMIT {
            stacks.clear();
        }
        stacks.insert((hash, base), stack);
        Some(stack)
    });
    stack.flatten().unwrap_or(base)
}

/// Returns the stack of this thread's Python lines. Returns `None` if the thread runs no Python, if the
/// layout is unknown, or if the stack contains frames of TorchInductor, whose generated code allocates
/// without ops.
pub(crate) fn outside_compiled_code() -> Option<StackId> {
    const COMPILED: &str = "/torch/_inductor/";
    let stack = current(0);
    let is_compiled = || with_tables(|tables| tables.has_frame(stack, |text| text.contains(COMPILED)));
    (stack != 0 && !is_compiled()).then_some(stack)
}

/// Folds a word into a hash. As in `wyhash`, the result is the XOR of the two halves of a 128-bit product.
#[inline]
fn mixed(hash: u64, word: u64) -> u64 {
    let product = u128::from(hash ^ 0x9E37_79B9_7F4A_7C15) * u128::from(word ^ 0xE703_7ED1_A0B4_28DB);
    (product as u64) ^ (product >> 64) as u64
}

/// Reads the frames from `frame` outwards. Frames without code (where C called Python) are left out.
///
/// # Safety
/// `frame` is null or a running frame of this thread, and `layout` is the frame layout of this interpreter.
unsafe fn read_frames(layout: &FrameLayout, mut frame: *const usize, walk: &mut Vec<FrameLine>) {
    let mut steps = 0;
    while !frame.is_null() && walk.len() < MAX_FRAMES && steps < 4 * MAX_FRAMES {
        steps += 1;
        // SAFETY: a frame that has not returned has these words, and no other thread changes them. Since
        // Python 3.14, the low bits of the word that points to the code are a tag.
        let (code, previous) = unsafe { (*frame.add(layout.code) & !7, *frame.add(layout.previous)) };
        let object = code as *const usize;
        // SAFETY: the word of a running frame points to its code or to `None`. The second word of either
        // object is its type.
        if code != 0 && unsafe { *object.add(1) } == layout.code_type {
            let byte = match layout.instruction {
                Instruction::Address { word, first } => {
                    // SAFETY: the frame has this word, as above.
                    unsafe { *frame.add(word) }.wrapping_sub(code + first) as i32
                }
                Instruction::Number { byte, step } => {
                    // SAFETY: the frame has this half word, as above.
                    let number = unsafe { frame.byte_add(byte).cast::<i32>().read() };
                    step * number
                }
            };
            // SAFETY: `object` is a code object, which has these words.
            let [filename, name, lines] =
                [layout.filename, layout.name, layout.lines].map(|word| unsafe { *object.add(word) } as u64);
            let mark = filename ^ name.rotate_left(21) ^ lines.rotate_left(42);
            walk.push(FrameLine { code, byte, mark });
        }
        frame = previous as *const usize;
    }
}

/// Returns the text `file:line function`; 0 if the frame is left out, as the tracer's own frames are.
///
/// # Safety
/// The code of `line` runs on this thread, and `layout` is the frame layout of this interpreter.
unsafe fn text_of_line(layout: &FrameLayout, functions: &Functions, line: &FrameLine) -> TextId {
    // SAFETY: by the contract.
    match unsafe { parts_of_line(layout, functions, line) } {
        Some((file, number, name)) => text_id(&format!("{file}:{number} {name}")),
        None => 0,
    }
}

/// Returns the file, the number and the function of a line, or `None` for a frame that is left out.
///
/// # Safety
/// Same as for [`text_of_line`].
unsafe fn parts_of_line(
    layout: &FrameLayout,
    functions: &Functions,
    line: &FrameLine,
) -> Option<(String, i32, String)> {
    let code = line.code as *const usize;
    // SAFETY: `code` is a code object, and the function reads only its table of lines.
    let number = unsafe { (functions.line_of)(code, line.byte) };
    // SAFETY: `code` has these words, which point to objects that it holds.
    let texts = [layout.filename, layout.name]
        .map(|word| unsafe { text(layout, functions, *code.add(word) as *const usize) });
    let [Some(file), Some(name)] = texts else { return None };
    // Python 3.12 adds a trampoline frame where C calls Python. This frame is left out, like the tracer's
    // frames.
    if name == "<interpreter trampoline>" || file.starts_with("<memtrace") {
        return None;
    }
    Some((file, number, name))
}

/// Copies a `str` without making Python allocate. Returns `None` if the object is not a `str` or is too long.
///
/// # Safety
/// `object` is null or a live object.
unsafe fn text(layout: &FrameLayout, functions: &Functions, object: *const usize) -> Option<String> {
    const LONGEST: usize = 4096;
    // SAFETY: the second word of an object is its type.
    if object.is_null() || unsafe { *object.add(1) } != layout.text_type {
        return None;
    }
    // SAFETY: `object` is a `str`, and the function reads its length.
    let length = unsafe { (functions.length_of)(object) };
    if !(0..=LONGEST as isize).contains(&length) {
        return None;
    }
    let mut characters = vec![0u32; length as usize];
    // SAFETY: `object` is a `str`, and the buffer has room for its characters. The last argument, 0, means
    // that no terminator is written.
    let copied = unsafe { (functions.text_of)(object, characters.as_mut_ptr(), length, 0) };
    let characters = characters.into_iter().map(|c| char::from_u32(c).unwrap_or(char::REPLACEMENT_CHARACTER));
    (!copied.is_null()).then(|| characters.collect())
}

/// Derives the layout of this interpreter's frames. Returns true if Python lines can be read from now on.
/// With `is_recorded`, Python lines are then recorded as with `MEMTRACE_STACKS=python`.
///
/// # Safety
/// The GIL is held. `known` describes frames that run on this thread during the call, by addresses of live
/// objects.
pub(crate) unsafe fn learn(known: &KnownCode, is_recorded: bool) -> bool {
    // SAFETY: by the contract.
    let found =
        Functions::find().and_then(|functions| Some((unsafe { find(known, &functions) }?, functions)));
    let Some((layout, functions)) = found else { return false };
    // Accept the layout only if it reads the same frames that Python described.
    let mut walk = Vec::new();
    // SAFETY: `find` has read these places of this thread's frames.
    unsafe { read_frames(&layout, first_frame(&layout, &functions), &mut walk) };
    let read = walk.iter().skip_while(|line| line.code != known.code).skip(1);
    let is_right = |(line, frame): (&FrameLine, &KnownFrame)| {
        // SAFETY: `line.code` is the code of a running frame.
        let number = unsafe { (functions.line_of)(line.code as *const usize, line.byte) };
        line.code == frame.code && line.byte as usize == frame.byte && number as usize == frame.line
    };
    let agrees = read.clone().count() >= known.callers.len() && read.zip(&known.callers).all(is_right);
    if agrees && LAYOUT.set((layout, functions)).is_ok() {
        IS_RECORDED.store(is_recorded, Ordering::Release);
    }
    agrees
}

/// The number of words to search, from the start of a thread's state and from the start of a frame. In all
/// tested versions, the wanted words are among these.
const THREAD_WORDS: usize = 24;
const FRAME_WORDS: usize = 16;

/// Finds the layout with guarded reads, which fail instead of crashing on an invalid address.
///
/// # Safety
/// Same as [`learn`].
unsafe fn find(known: &KnownCode, functions: &Functions) -> Option<FrameLayout> {
    let memory = GuardedMemory::open()?;
    // SAFETY: the GIL is held, so the thread has a state.
    let thread = unsafe { (functions.this_thread)() } as usize;
    let words: [usize; THREAD_WORDS] = memory.words(thread)?;
    let (thread, through, frame) = words.iter().enumerate().find_map(|(word, place)| {
        let is_calling_frame = |frame: &usize| code_of(&memory, *frame, known.code).is_some();
        if is_calling_frame(place) {
            return Some((word, None, *place));
        }
        let inner: [usize; 2] = memory.words(*place)?;
        let through = inner.iter().position(is_calling_frame)?;
        Some((word, Some(through), inner[through]))
    })?;
    let code = code_of(&memory, frame, known.code)?;
    let [first, second, ..] = known.callers[..] else { return None };
    let leads_to = |frame: usize, caller: &KnownFrame| {
        let words: [usize; FRAME_WORDS] = memory.words(frame)?;
        let is_caller = |place: &usize| {
            memory.words::<FRAME_WORDS>(*place).is_some_and(|words| words[code] & !7 == caller.code)
        };
        words.iter().position(is_caller).map(|word| (word, words[word]))
    };
    let (previous, outer) = leads_to(frame, &first)?;
    let (again, outermost) = leads_to(outer, &second)?;
    if again != previous {
        return None;
    }
    let frames: [[usize; FRAME_WORDS]; 2] = [memory.words(outer)?, memory.words(outermost)?];
    let word_of = |object: usize| {
        let holds = |word: &usize| memory.words::<1>(first.code + word * 8) == Some([object]);
        (0..known.code_size / 8).find(holds)
    };
    // SAFETY: both addresses are addresses of live objects, by the contract.
    let (code_type, text_type) =
        unsafe { (*(first.code as *const usize).add(1), *(known.filename as *const usize).add(1)) };
    Some(FrameLayout {
        thread,
        through,
        code,
        previous,
        instruction: instruction(&frames, &[first, second], known.code_size)?,
        filename: word_of(known.filename)?,
        name: word_of(known.name)?,
        lines: word_of(known.lines)?,
        code_type,
        text_type,
    })
}

/// Returns the index of the word in the frame that points to the code object at `code`, or `None` if no word
/// does.
fn code_of(memory: &GuardedMemory, frame: usize, code: usize) -> Option<usize> {
    let words: [usize; FRAME_WORDS] = memory.words(frame)?;
    words.iter().position(|word| *word & !7 == code)
}

/// Finds the encoding of positions that fits two frames, whose positions `known` contains. Returns `None` if
/// no encoding fits.
fn instruction(
    frames: &[[usize; FRAME_WORDS]; 2],
    known: &[KnownFrame; 2],
    code_size: usize,
) -> Option<Instruction> {
    let pairs = || frames.iter().zip(known);
    let is_address = |word: &usize| pairs().all(|(frame, k)| frame[*word] == k.code + code_size + k.byte);
    if let Some(word) = (0..FRAME_WORDS).find(is_address) {
        return Some(Instruction::Address { word, first: code_size });
    }
    [1, 2].into_iter().find_map(|step| {
        let number = |frame: &[usize; FRAME_WORDS], byte: usize| {
            let half = frame[byte / 8] >> (byte % 8 * 8);
            half as u32 as usize * step
        };
        let is_it = |byte: &usize| pairs().all(|(frame, known)| number(frame, *byte) == known.byte);
        let byte = (0..FRAME_WORDS * 8).step_by(4).find(is_it)?;
        Some(Instruction::Number { byte, step: step as i32 })
    })
}
