//! A reader for the few pickle opcodes that a memory snapshot uses.
//!
//! The pickle is parsed, never executed: an opcode that could import or call something ends the reading with
//! an error. Each complete dict is passed to a [`Fold`], which keeps the fields that it knows and drops all
//! others. Existing crates do not read a pickle as a stream. They build the whole tree, which needs many
//! times the memory of the events.

use std::io::{self, BufRead, Read};
use std::ops::Range;
use std::sync::Arc;

use rustc_hash::FxHashMap;

/// The maximum nesting depth of open containers. A snapshot needs six.
const DEEPEST: usize = 64;
/// The maximum number of values that wait for their container. Python adds at most 1,000 at a time.
const MOST_WAITING: usize = 1 << 16;
/// The maximum number of keys of a dict that is passed to a fold. An event has ten.
const MOST_KEYS: usize = 64;
/// The maximum length of one text, in bytes.
const LONGEST_TEXT: u64 = 1 << 20;
/// The maximum size of all different texts together, in bytes.
const MOST_TEXT: usize = 96 << 20;

/// The maximum number of dicts and lists that no fold replaces. A snapshot has one per segment, and a few
/// more.
const MOST_NODES: usize = 1 << 21;

/// A value of the pickle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Value {
    Bool(bool),
    Int(i64),
    Ref(Ref),
}

/// A value that a pickle may refer to again. A `Ref` is half as large as a [`Value`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ref {
    /// `None`, or a number of a type or size that no known field has.
    Nothing,
    /// The index of a text.
    Text(u32),
    /// The index of a node.
    Node(u32),
    /// A dict or list that the [`Fold`] replaced, and the number that the fold assigned to it.
    Folded(Folded, u32),
}

/// A container of the pickle.
#[derive(Debug)]
enum Node {
    Dict(Vec<(u32, Value)>),
    List(Vec<Value>),
    /// A list of consecutive events.
    Events(Range<u32>),
}

/// A node, and the memo entry that refers to it.
#[derive(Debug)]
struct Slot {
    node: Node,
    memo: Option<u32>,
}

/// The known kinds of dicts and lists in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Folded {
    Frame,
    Stack,
    Block,
    Segment,
    Event,
}

/// Replaces complete dicts by smaller values.
pub(super) trait Fold {
    /// Processes a dict. Returns its kind and number, or `None` if its kind is unknown. An unknown dict is
    /// kept.
    fn fold(&mut self, dict: &[(u32, Value)], values: &mut Values) -> Result<Option<(Folded, u32)>, String>;
}

/// The containers and texts of a pickle.
#[derive(Debug, Default)]
pub(super) struct Values {
    nodes: Vec<Slot>,
    memo: Vec<Ref>,
    pub(super) texts: Vec<Arc<str>>,
    by_text: FxHashMap<Arc<str>, u32>,
    text_bytes: usize,
}

impl Values {
    /// Returns the index of a text, after adding the text if it is new. Fails if all texts together exceed
    /// [`MOST_TEXT`].
    fn intern(&mut self, text: &str) -> Result<u32, String> {
        if let Some(index) = self.by_text.get(text) {
            return Ok(*index);
        }
        // The size of an entry without its text, in bytes.
        const ENTRY: usize = 64;
        self.text_bytes += text.len() + ENTRY;
        if self.text_bytes > MOST_TEXT {
            return Err(format!("its strings take more than {} MiB", MOST_TEXT >> 20));
        }
        let index = self.texts.len() as u32;
        let text: Arc<str> = text.into();
        self.texts.push(Arc::clone(&text));
        self.by_text.insert(text, index);
        Ok(index)
    }

    /// Returns the text of a value, or `None` if the value is not a text.
    pub(super) fn text(&self, value: Value) -> Option<&str> {
        match value {
            Value::Ref(Ref::Text(index)) => self.texts.get(index as usize).map(|text| &**text),
            _ => None,
        }
    }

    /// Returns the elements of a value, or `None` if the value is not a list or tuple.
    pub(super) fn list(&self, value: Value) -> Option<&[Value]> {
        match self.node(value)? {
            Node::List(list) => Some(list),
            _ => None,
        }
    }

    /// Returns the numbers of the events in a list of consecutive events, or `None` if the value is not such
    /// a list.
    pub(super) fn events(&self, value: Value) -> Option<Range<u32>> {
        match self.node(value)? {
            Node::Events(events) => Some(events.clone()),
            Node::List(list) if list.is_empty() => Some(0..0),
            _ => None,
        }
    }

    /// Returns the number that a fold assigned to a value, if the value is of this kind.
    pub(super) fn folded(value: Value, kind: Folded) -> Option<u32> {
        match value {
            Value::Ref(Ref::Folded(found, number)) if found == kind => Some(number),
            _ => None,
        }
    }

    /// Returns the value of a key in a dict, or `None` if a fold replaced the dict or the key is missing.
    pub(super) fn get(&self, dict: Value, key: &str) -> Option<Value> {
        let Node::Dict(items) = self.node(dict)? else { return None };
        items.iter().find(|(name, _)| &*self.texts[*name as usize] == key).map(|(_, value)| *value)
    }

    fn node(&self, value: Value) -> Option<&Node> {
        match value {
            Value::Ref(Ref::Node(index)) => self.nodes.get(index as usize).map(|slot| &slot.node),
            _ => None,
        }
    }

    /// Replaces a node by the number that the fold assigned to it, in the memo too.
    pub(super) fn replace(&mut self, value: Value, kind: Folded, number: u32) {
        let Value::Ref(Ref::Node(index)) = value else { return };
        let is_last = index as usize + 1 == self.nodes.len();
        let Some(slot) = self.nodes.get_mut(index as usize) else { return };
        slot.node = Node::List(Vec::new());
        if let Some(entry) = slot.memo.and_then(|memo| self.memo.get_mut(memo as usize)) {
            *entry = Ref::Folded(kind, number);
        }
        if is_last {
            self.nodes.pop();
        }
    }

    fn add(&mut self, node: Node) -> Result<Value, String> {
        if self.nodes.len() >= MOST_NODES {
            return Err(format!("it has more than {MOST_NODES} dicts and lists of no known kind"));
        }
        self.nodes.push(Slot { node, memo: None });
        Ok(Value::Ref(Ref::Node(self.nodes.len() as u32 - 1)))
    }

    /// Adds values to the list at `index`.
    fn extend(&mut self, index: u32, values: &[Value]) -> Result<(), String> {
        const NO_LIST: &str = "it appends to a value that is not a list or is already complete";
        let slot = self.nodes.get_mut(index as usize).ok_or(NO_LIST)?;
        if let Node::List(list) = &mut slot.node {
            match values.first() {
                Some(Value::Ref(Ref::Folded(Folded::Event, first))) if list.is_empty() => {
                    slot.node = Node::Events(*first..*first);
                }
                _ => {
                    list.extend_from_slice(values);
                    return Ok(());
                }
            }
        }
        let Node::Events(events) = &mut slot.node else { return Err(NO_LIST.to_owned()) };
        for value in values {
            if *value != Value::Ref(Ref::Folded(Folded::Event, events.end)) {
                let wrong = "a list of events contains a value that is not an event, or repeats an event";
                return Err(wrong.to_owned());
            }
            events.end += 1;
        }
        Ok(())
    }

    /// Adds a memo entry, or replaces an existing one.
    fn memoize(&mut self, index: usize, value: Value, read: u64) -> Result<(), String> {
        let Value::Ref(entry) = value else { return Err("its memo has a number".to_owned()) };
        if let Ref::Node(node) = entry
            && let Some(slot) = self.nodes.get_mut(node as usize)
        {
            slot.memo = Some(index as u32);
        }
        let next = self.memo.len();
        match self.memo.get_mut(index) {
            Some(place) => *place = entry,
            // Each new entry takes at least two opcodes, one to make the value and one to memoize it. A memo
            // that grows faster is invalid.
            None if index == next && index as u64 <= read / 2 => self.memo.push(entry),
            None => return Err(format!("its memo jumps to entry {index}")),
        }
        Ok(())
    }
}

/// Reads a pickle to its end. Returns its value and the containers and texts that the value refers to.
pub(super) fn read(source: impl BufRead, fold: &mut impl Fold) -> Result<(Value, Values), String> {
    let mut reader = Reader {
        source,
        values: Values::default(),
        stack: Vec::new(),
        marks: Vec::new(),
        buffer: Vec::new(),
        read: 0,
    };
    loop {
        if let Some(value) = reader.step(fold)? {
            return Ok((value, reader.values));
        }
    }
}

struct Reader<R> {
    source: R,
    values: Values,
    stack: Vec<Value>,
    /// For each MARK opcode that no other opcode has consumed, the height of the stack at that time.
    marks: Vec<usize>,
    buffer: Vec<u8>,
    /// The number of opcodes read.
    read: u64,
}

impl<R: BufRead> Reader<R> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], String> {
        let mut bytes = [0; N];
        self.source.read_exact(&mut bytes).map_err(|error| ended(&error))?;
        Ok(bytes)
    }

    fn text(&mut self, length: u64) -> Result<(), String> {
        if length > LONGEST_TEXT {
            return Err(format!("it has a string of {length} bytes"));
        }
        self.buffer.clear();
        let read = self.source.by_ref().take(length).read_to_end(&mut self.buffer);
        if read.map_err(|error| ended(&error))? as u64 != length {
            return Err(CUT_OFF.to_owned());
        }
        let text = String::from_utf8_lossy(&self.buffer);
        let index = self.values.intern(&text)?;
        self.push(Value::Ref(Ref::Text(index)))
    }

    fn push(&mut self, value: Value) -> Result<(), String> {
        if self.stack.len() >= MOST_WAITING {
            return Err(format!("more than {MOST_WAITING} values wait for their list"));
        }
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, String> {
        let bottom = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= bottom {
            return Err("an opcode has no value".to_owned());
        }
        self.stack.pop().ok_or_else(|| "an opcode has no value".to_owned())
    }

    fn mark(&mut self) -> Result<usize, String> {
        self.marks.pop().ok_or_else(|| "an opcode has no mark".to_owned())
    }

    fn memoize(&mut self, index: usize) -> Result<(), String> {
        let value = *self.stack.last().ok_or("an opcode has no value")?;
        self.values.memoize(index, value, self.read)
    }

    fn recall(&mut self, index: usize) -> Result<(), String> {
        let entry = *self.values.memo.get(index).ok_or_else(|| format!("it has no memo entry {index}"))?;
        self.push(Value::Ref(entry))
    }

    fn tuple(&mut self, from: usize) -> Result<(), String> {
        let list = self.stack.split_off(from);
        let node = self.values.add(Node::List(list))?;
        self.push(node)
    }

    /// Returns the value directly below index `from` of the stack.
    fn below(&self, from: usize) -> Option<Value> {
        self.stack.get(from.checked_sub(1)?).copied()
    }

    fn append(&mut self, from: usize) -> Result<(), String> {
        let Some(Value::Ref(Ref::Node(list))) = self.below(from) else {
            return Err("it appends to a value that is not a list".to_owned());
        };
        self.values.extend(list, &self.stack[from..])?;
        self.stack.truncate(from);
        Ok(())
    }

    fn set_items(&mut self, from: usize, fold: &mut impl Fold) -> Result<(), String> {
        const NO_DICT: &str = "it sets an item of a value that is not a dict or is already complete";
        let Some(value @ Value::Ref(Ref::Node(index))) = self.below(from) else {
            return Err(NO_DICT.to_owned());
        };
        let Some(Slot { node: Node::Dict(kept), .. }) = self.values.nodes.get_mut(index as usize) else {
            return Err(NO_DICT.to_owned());
        };
        let mut items = std::mem::take(kept);
        for pair in self.stack[from..].chunks(2) {
            match pair {
                [Value::Ref(Ref::Text(key)), value] => items.push((*key, *value)),
                [_, _] => {}
                _ => return Err("a dict has a key without a value".to_owned()),
            }
        }
        self.stack.truncate(from);
        let folded = match items.len() <= MOST_KEYS {
            true => fold.fold(&items, &mut self.values)?,
            false => None,
        };
        if let Some((kind, number)) = folded {
            self.values.replace(value, kind, number);
            if let Some(place) = self.stack.last_mut() {
                *place = Value::Ref(Ref::Folded(kind, number));
            }
        } else if let Some(slot) = self.values.nodes.get_mut(index as usize) {
            slot.node = Node::Dict(items);
        }
        Ok(())
    }

    /// Executes one opcode. Returns the value of the pickle at the end of the pickle.
    fn step(&mut self, fold: &mut impl Fold) -> Result<Option<Value>, String> {
        let [opcode] = self.bytes()?;
        self.read += 1;
        match opcode {
            // The opcodes PROTO and FRAME.
            0x80 => drop(self.bytes::<1>()?),
            0x95 => drop(self.bytes::<8>()?),
            b'.' => {
                let value = self.pop()?;
                return if self.stack.is_empty() && self.marks.is_empty() {
                    Ok(Some(value))
                } else {
                    Err("it ends inside a list".to_owned())
                };
            }
            b'(' => {
                if self.marks.len() >= DEEPEST {
                    return Err(format!("its lists are nested more than {DEEPEST} deep"));
                }
                self.marks.push(self.stack.len());
            }
            b'N' => self.push(Value::Ref(Ref::Nothing))?,
            0x88 => self.push(Value::Bool(true))?,
            0x89 => self.push(Value::Bool(false))?,
            b'K' => {
                let [byte] = self.bytes()?;
                self.push(Value::Int(byte.into()))?;
            }
            b'M' => {
                let number = u16::from_le_bytes(self.bytes()?);
                self.push(Value::Int(number.into()))?;
            }
            b'J' => {
                let number = i32::from_le_bytes(self.bytes()?);
                self.push(Value::Int(number.into()))?;
            }
            0x8A => self.long()?,
            b'G' => {
                self.bytes::<8>()?;
                self.push(Value::Ref(Ref::Nothing))?;
            }
            0x8C => {
                let [length] = self.bytes()?;
                self.text(length.into())?;
            }
            b'X' => {
                let length = u32::from_le_bytes(self.bytes()?);
                self.text(length.into())?;
            }
            0x8D => {
                let length = u64::from_le_bytes(self.bytes()?);
                self.text(length)?;
            }
            b'}' => {
                let node = self.values.add(Node::Dict(Vec::new()))?;
                self.push(node)?;
            }
            b']' => {
                let node = self.values.add(Node::List(Vec::new()))?;
                self.push(node)?;
            }
            b')' => self.tuple(self.stack.len())?,
            0x85..=0x87 => {
                let count = usize::from(opcode - 0x84);
                let bottom = self.marks.last().copied().unwrap_or(0);
                let from = self.stack.len().checked_sub(count).filter(|from| *from >= bottom);
                self.tuple(from.ok_or("an opcode has no value")?)?;
            }
            b't' => {
                let from = self.mark()?;
                self.tuple(from)?;
            }
            b'a' => {
                let bottom = self.marks.last().copied().unwrap_or(0);
                let from = self.stack.len().checked_sub(1).filter(|from| *from > bottom);
                self.append(from.ok_or("an opcode has no value")?)?;
            }
            b'e' => {
                let from = self.mark()?;
                self.append(from)?;
            }
            b's' => {
                let bottom = self.marks.last().copied().unwrap_or(0);
                let from = self.stack.len().checked_sub(2).filter(|from| *from > bottom);
                self.set_items(from.ok_or("an opcode has no value")?, fold)?;
            }
            b'u' => {
                let from = self.mark()?;
                self.set_items(from, fold)?;
            }
            0x94 => self.memoize(self.values.memo.len())?,
            b'q' => {
                let [index] = self.bytes()?;
                self.memoize(index.into())?;
            }
            b'r' => {
                let index = u32::from_le_bytes(self.bytes()?);
                self.memoize(index as usize)?;
            }
            b'h' => {
                let [index] = self.bytes()?;
                self.recall(index.into())?;
            }
            b'j' => {
                let index = u32::from_le_bytes(self.bytes()?);
                self.recall(index as usize)?;
            }
            _ => return Err(refused(opcode)),
        }
        Ok(None)
    }

    /// Executes LONG1: pushes a number of at most 255 bytes. No field that is read has more than 8 bytes, but
    /// the line of a frame without one may be 2^64 - 1.
    fn long(&mut self) -> Result<(), String> {
        let [length] = self.bytes()?;
        let mut bytes = [0; 255];
        let bytes = &mut bytes[..usize::from(length)];
        self.source.read_exact(bytes).map_err(|error| ended(&error))?;
        if bytes.len() > 8 {
            return self.push(Value::Ref(Ref::Nothing));
        }
        let sign = if bytes.last().is_some_and(|last| last & 0x80 != 0) { 0xFF } else { 0 };
        let mut number = [sign; 8];
        number[..bytes.len()].copy_from_slice(bytes);
        self.push(Value::Int(i64::from_le_bytes(number)))
    }
}

const CUT_OFF: &str = "it is cut off";

fn ended(error: &io::Error) -> String {
    if error.kind() == io::ErrorKind::UnexpectedEof { CUT_OFF.to_owned() } else { error.to_string() }
}

/// Returns the error message for an opcode that no snapshot has.
fn refused(opcode: u8) -> String {
    let name = match opcode {
        b'c' => "GLOBAL",
        0x93 => "STACK_GLOBAL",
        b'R' => "REDUCE",
        b'i' => "INST",
        b'o' => "OBJ",
        b'b' => "BUILD",
        0x81 => "NEWOBJ",
        0x92 => "NEWOBJ_EX",
        b'P' | b'Q' => "PERSID",
        0x82..=0x84 => "EXT",
        _ => return format!("it has the pickle opcode {opcode:#04x}, which no memory snapshot has"),
    };
    format!("it has the pickle opcode {name}, which loads or runs code; nothing of it was executed")
}
