//! The lines of Python that made a call, for `MEMTRACE_STACKS=python`.
//!
//! torch's bindings let go of the GIL before they run an op, and a hook must not wait for it, so no function of
//! Python that counts references or makes objects can be called. But a thread's frames are changed by that
//! thread alone, and a running frame keeps its code alive: a thread may read its own frames, GIL or not. Where
//! their fields are differs in each version of Python (3.9 to 3.14); it is learned once, with the GIL held, from
//! frames that are known ([`learn`]), and believed only when every line then read is the one that Python says.
//! An interpreter whose frames are not understood has no such stacks, and one line says so.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_record::intern::{Frame, StackId, TextId};
use memtrace_record::recorder::{stack_id, text_id};
use memtrace_trace::stacks::FrameKind;
use rustc_hash::FxHashMap;

use crate::ffi::symbols::find_global;

/// Where an interpreter keeps what is read; words are of 8 bytes.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// The word of the thread's state that leads to its innermost frame,
    thread: usize,
    /// through this word of another struct (`_PyCFrame` of 3.11 and 3.12).
    through: Option<usize>,
    /// Words of a frame: its code, and the frame around it.
    code: usize,
    previous: usize,
    instruction: Instruction,
    /// Words of a code object by which it is known again: an address may be another's later.
    filename: usize,
    name: usize,
    lines: usize,
    /// The types of code and of text.
    code_type: usize,
    text_type: usize,
}

/// Where a frame is in its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Instruction {
    /// A word with the address of an instruction; the first one lies so far behind the code object (3.11 on).
    Address { word: usize, first: usize },
    /// A 32-bit number at this byte, which counts steps of so many bytes (3.9, 3.10).
    Number { byte: usize, step: i32 },
}

/// Functions of Python that only read.
#[derive(Clone, Copy)]
struct Functions {
    is_initialized: unsafe extern "C" fn() -> c_int,
    this_thread: unsafe extern "C" fn() -> *const usize,
    line_of: unsafe extern "C" fn(*const usize, c_int) -> c_int,
    length_of: unsafe extern "C" fn(*const usize) -> isize,
    text_of: unsafe extern "C" fn(*const usize, *mut u32, isize, c_int) -> *mut u32,
}

static LAYOUT: OnceLock<(Layout, Functions)> = OnceLock::new();
/// Is it known? As one atomic, for hooks.
static KNOWN: AtomicBool = AtomicBool::new(false);

/// A frame that Python told of: the address of its code, the byte of its instruction, its line.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub(crate) code: usize,
    pub(crate) byte: usize,
    pub(crate) line: usize,
}

/// What else [`learn`] is told: addresses, and a size.
pub(crate) struct Told {
    /// The code of the calling frame.
    pub(crate) code: usize,
    /// Its callers, innermost first: two at least, each at another place of its code.
    pub(crate) callers: Vec<Known>,
    /// Of the first caller's code: the objects that it has.
    pub(crate) filename: usize,
    pub(crate) name: usize,
    pub(crate) lines: usize,
    /// The size of a code object before its instructions.
    pub(crate) code_size: usize,
}

/// A frame as it is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Line {
    code: usize,
    byte: i32,
    /// The mixed words by which the code is known.
    mark: u64,
}

/// More frames than this are not looked at: the innermost count.
const DEEPEST: usize = 128;
/// What a thread remembers before it begins again.
const MOST: usize = 1 << 14;

#[derive(Default)]
struct Remembered {
    lines: FxHashMap<Line, TextId>,
    stacks: FxHashMap<(u64, StackId), StackId>,
    walk: Vec<Line>,
}

thread_local! {
    static REMEMBERED: RefCell<Remembered> = RefCell::default();
}

/// Are lines of Python to be had?
#[inline]
pub(crate) fn are_known() -> bool {
    KNOWN.load(Ordering::Relaxed)
}

/// The innermost frame of this thread and where it is, as one comparable thing; within one op, equal ones are of
/// the same stack.
#[inline]
pub(crate) fn innermost() -> (usize, usize) {
    let Some((layout, functions)) = LAYOUT.get() else { return (0, 0) };
    let frame = first_frame(layout, functions);
    if frame.is_null() {
        return (0, 0);
    }
    let at = match layout.instruction {
        // SAFETY: a running frame of this thread, whose words are there by what was learned.
        Instruction::Address { word, .. } => unsafe { *frame.add(word) },
        // SAFETY: as above.
        Instruction::Number { byte, .. } => unsafe { frame.byte_add(byte).cast::<i32>().read() as usize },
    };
    (frame as usize, at)
}

fn first_frame(layout: &Layout, functions: &Functions) -> *const usize {
    // SAFETY: both only read; the second gives this thread's state, or null where Python never ran. From the
    // moment that an interpreter ends it is not initialized, and then states of threads are freed.
    let thread = unsafe {
        if (functions.is_initialized)() == 0 {
            return std::ptr::null();
        }
        (functions.this_thread)()
    };
    if thread.is_null() {
        return thread;
    }
    // SAFETY: the state of a thread is there while the thread runs, and has this word.
    let mut place = unsafe { *thread.add(layout.thread) } as *const usize;
    if let Some(word) = layout.through
        && !place.is_null()
    {
        // SAFETY: the struct that the word before it leads to.
        place = unsafe { *place.add(word) } as *const usize;
    }
    place
}

/// The stack of this thread's Python on top of `base`; `base` where there is none.
pub(crate) fn current(base: StackId) -> StackId {
    let Some((layout, functions)) = LAYOUT.get() else { return base };
    REMEMBERED
        .try_with(|remembered| {
            let Ok(mut remembered) = remembered.try_borrow_mut() else { return base };
            let Remembered { lines, stacks, walk } = &mut *remembered;
            walk.clear();
            read_frames(layout, first_frame(layout, functions), walk);
            let hash = walk.iter().fold(0, |hash, line| {
                mixed(mixed(hash, line.code as u64 ^ line.mark.rotate_left(20)), line.byte as u64)
            });
            if let Some(stack) = stacks.get(&(hash, base)) {
                return *stack;
            }
            let mut stack = base;
            for line in walk.iter().rev() {
                if lines.len() >= MOST {
                    lines.clear();
                }
                let text = *lines.entry(*line).or_insert_with(|| text_of_line(layout, functions, line));
                if text != 0 {
                    stack = stack_id(Frame { parent: stack, text, kind: FrameKind::Python });
                }
            }
            if stacks.len() >= MOST {
                stacks.clear();
            }
            stacks.insert((hash, base), stack);
            stack
        })
        .unwrap_or(base)
}

/// Folds a word into a hash (as `wyhash` does: the halves of a wide product).
#[inline]
fn mixed(hash: u64, word: u64) -> u64 {
    let product = u128::from(hash ^ 0x9E37_79B9_7F4A_7C15) * u128::from(word ^ 0xE703_7ED1_A0B4_28DB);
    (product as u64) ^ (product >> 64) as u64
}

/// The frames from `frame` outwards. Those that belong to no code (where C called Python) are passed over.
fn read_frames(layout: &Layout, mut frame: *const usize, walk: &mut Vec<Line>) {
    let mut steps = 0;
    while !frame.is_null() && walk.len() < DEEPEST && steps < 4 * DEEPEST {
        steps += 1;
        // SAFETY: a frame of this thread that has not returned: its words are there by what was learned, and
        // nobody else changes them. From 3.14 on the low bits of the code's word are a tag.
        let (code, previous) = unsafe { (*frame.add(layout.code) & !7, *frame.add(layout.previous)) };
        let object = code as *const usize;
        // SAFETY: a running frame holds its code, or `None`: an object, whose second word is its type.
        if code != 0 && unsafe { *object.add(1) } == layout.code_type {
            let byte = match layout.instruction {
                Instruction::Address { word, first } => {
                    // SAFETY: a word of the frame, as above.
                    unsafe { *frame.add(word) }.wrapping_sub(code + first) as i32
                }
                Instruction::Number { byte, step } => {
                    // SAFETY: half a word of the frame, as above.
                    let number = unsafe { frame.byte_add(byte).cast::<i32>().read() };
                    step * number
                }
            };
            // SAFETY: words of a code object, as was learned.
            let [filename, name, lines] =
                [layout.filename, layout.name, layout.lines].map(|word| unsafe { *object.add(word) } as u64);
            walk.push(Line { code, byte, mark: filename ^ name.rotate_left(21) ^ lines.rotate_left(42) });
        }
        frame = previous as *const usize;
    }
}

/// `file:line function`; 0 for what is no line of anybody.
fn text_of_line(layout: &Layout, functions: &Functions, line: &Line) -> TextId {
    let code = line.code as *const usize;
    // SAFETY: the code of a running frame; the function reads its table of lines and nothing else.
    let number = unsafe { (functions.line_of)(code, line.byte) };
    // SAFETY: words of a code object, as was learned.
    let words = unsafe { [*code.add(layout.filename), *code.add(layout.name)] };
    let [Some(file), Some(name)] = words.map(|word| text(layout, functions, word as *const usize)) else {
        return 0;
    };
    // Where C calls Python, 3.12 has a frame of its own; and what we run in there is nobody's business.
    if name == "<interpreter trampoline>" || file == "<memtrace>" {
        return 0;
    }
    text_id(&format!("{file}:{number} {name}"))
}

/// The text of a `str`, which is copied with no allocation by Python.
fn text(layout: &Layout, functions: &Functions, object: *const usize) -> Option<String> {
    const LONGEST: usize = 4096;
    // SAFETY: an attribute of a code object is an object, whose second word is its type.
    if object.is_null() || unsafe { *object.add(1) } != layout.text_type {
        return None;
    }
    // SAFETY: it is a `str`; the function reads its length.
    let length = unsafe { (functions.length_of)(object) };
    if !(0..=LONGEST as isize).contains(&length) {
        return None;
    }
    let mut characters = vec![0u32; length as usize];
    // SAFETY: it is a `str`, and there is room for all of it without the 0 that is not asked for.
    let copied = unsafe { (functions.text_of)(object, characters.as_mut_ptr(), length, 0) };
    let characters = characters.into_iter().map(|c| char::from_u32(c).unwrap_or(char::REPLACEMENT_CHARACTER));
    (!copied.is_null()).then(|| characters.collect())
}

/// Learns where this interpreter keeps its frames, on the thread whose frames are told of, with the GIL. Gives
/// whether lines of Python are to be had from now on.
pub(crate) fn learn(told: &Told) -> bool {
    let found = functions().and_then(|functions| Some((find(told, &functions)?, functions)));
    let Some((layout, functions)) = found else { return false };
    // What was found is believed when it reads what Python told.
    let mut walk = Vec::new();
    read_frames(&layout, first_frame(&layout, &functions), &mut walk);
    let read = walk.iter().skip_while(|line| line.code != told.code).skip(1);
    let is_right = |(line, known): (&Line, &Known)| {
        // SAFETY: the code of a running frame.
        let number = unsafe { (functions.line_of)(line.code as *const usize, line.byte) };
        line.code == known.code && line.byte as usize == known.byte && number as usize == known.line
    };
    let agrees = read.clone().count() >= told.callers.len() && read.zip(&told.callers).all(is_right);
    if agrees && LAYOUT.set((layout, functions)).is_ok() {
        KNOWN.store(true, Ordering::Release);
    }
    agrees
}

fn functions() -> Option<Functions> {
    let names = [
        c"Py_IsInitialized",
        c"PyGILState_GetThisThreadState",
        c"PyCode_Addr2Line",
        c"PyUnicode_GetLength",
        c"PyUnicode_AsUCS4",
    ];
    let [is_initialized, this_thread, line_of, length_of, text_of] = names.map(find_global);
    if [is_initialized, this_thread, line_of, length_of, text_of].iter().any(|found| found.is_null()) {
        return None;
    }
    // SAFETY: their types in pylifecycle.h, pystate.h, code.h and unicodeobject.h, 3.9 to 3.14.
    unsafe {
        Some(Functions {
            is_initialized: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(
                is_initialized,
            ),
            this_thread: std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> *const usize>(
                this_thread,
            ),
            line_of: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const usize, c_int) -> c_int>(
                line_of,
            ),
            length_of: std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const usize) -> isize>(
                length_of,
            ),
            text_of: std::mem::transmute::<
                *mut c_void,
                unsafe extern "C" fn(*const usize, *mut u32, isize, c_int) -> *mut u32,
            >(text_of),
        })
    }
}

/// Words that are looked at: of a thread's state (it has more in every version), of what it leads to, of a frame.
const THREAD_WORDS: usize = 24;
const FRAME_WORDS: usize = 16;

fn find(told: &Told, functions: &Functions) -> Option<Layout> {
    let reader = Reader::new()?;
    // SAFETY: the GIL is held, so the thread has a state.
    let thread = unsafe { (functions.this_thread)() } as usize;
    let words: [usize; THREAD_WORDS] = reader.read(thread)?;
    let (thread, through, frame) = words.iter().enumerate().find_map(|(word, place)| {
        let is_ours = |frame: &usize| code_of(&reader, *frame, told.code).is_some();
        if is_ours(place) {
            return Some((word, None, *place));
        }
        let inner: [usize; 2] = reader.read(*place)?;
        let through = inner.iter().position(is_ours)?;
        Some((word, Some(through), inner[through]))
    })?;
    let code = code_of(&reader, frame, told.code)?;
    let [first, second, ..] = told.callers[..] else { return None };
    let leads_to = |frame: usize, known: &Known| {
        let words: [usize; FRAME_WORDS] = reader.read(frame)?;
        let is_it = |place: &usize| {
            reader.read::<FRAME_WORDS>(*place).is_some_and(|words| words[code] & !7 == known.code)
        };
        words.iter().position(is_it).map(|word| (word, words[word]))
    };
    let (previous, outer) = leads_to(frame, &first)?;
    let (again, outermost) = leads_to(outer, &second)?;
    if again != previous {
        return None;
    }
    let frames: [[usize; FRAME_WORDS]; 2] = [reader.read(outer)?, reader.read(outermost)?];
    let word_of = |object: usize| {
        let holds = |word: &usize| reader.read::<1>(first.code + word * 8) == Some([object]);
        (0..told.code_size / 8).find(holds)
    };
    // SAFETY: a code object and a text that Python told of.
    let (code_type, text_type) =
        unsafe { (*(first.code as *const usize).add(1), *(told.filename as *const usize).add(1)) };
    Some(Layout {
        thread,
        through,
        code,
        previous,
        instruction: instruction(&frames, &[first, second], told.code_size)?,
        filename: word_of(told.filename)?,
        name: word_of(told.name)?,
        lines: word_of(told.lines)?,
        code_type,
        text_type,
    })
}

/// The word of a frame that is this code.
fn code_of(reader: &Reader, frame: usize, code: usize) -> Option<usize> {
    let words: [usize; FRAME_WORDS] = reader.read(frame)?;
    words.iter().position(|word| *word & !7 == code)
}

/// Where two frames say which instruction they are at.
fn instruction(
    frames: &[[usize; FRAME_WORDS]; 2],
    known: &[Known; 2],
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

/// Reads memory that may not be there: the kernel says so, where a load would end the process.
struct Reader {
    pipe: [c_int; 2],
}

impl Reader {
    fn new() -> Option<Reader> {
        let mut pipe = [0; 2];
        // SAFETY: room for two descriptors.
        (unsafe { libc::pipe2(pipe.as_mut_ptr(), libc::O_CLOEXEC) } == 0).then_some(Reader { pipe })
    }

    fn read<const WORDS: usize>(&self, address: usize) -> Option<[usize; WORDS]> {
        let mut words = [0; WORDS];
        if address < 4096 || !address.is_multiple_of(8) {
            return None;
        }
        let size = WORDS * 8;
        // SAFETY: an address that cannot be read is an error of `write`; a pipe takes this little at once.
        let written = unsafe { libc::write(self.pipe[1], address as *const c_void, size) };
        if written <= 0 {
            return None;
        }
        // SAFETY: there is room for what was written.
        let read = unsafe { libc::read(self.pipe[0], words.as_mut_ptr().cast(), written as usize) };
        (read == size as isize).then_some(words)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // SAFETY: both are open and ours.
        self.pipe.iter().for_each(|end| unsafe {
            libc::close(*end);
        });
    }
}
