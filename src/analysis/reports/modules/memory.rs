//! Parameters, buffers, inputs and outputs of modules: `MemTracker`'s `parameter_mem`, `buffer_mem`,
//! `input_mem` and `output_mem`, rounded as the allocator does.
//!
//! With io records (`MEMTRACE_OPS=io`), all four are counted as in `MemTracker`: a storage counts each time
//! that it occurs. Without io records, inputs and outputs are unknown. Parameters and buffers are then the
//! sums of the tagged blocks of a module and its submodules, and a tied weight counts once, for the module
//! that has it first.

use std::collections::BTreeMap;

use memtrace_trace::{Api, Category, EventName};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use crate::read::record::Record;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::is_unknown_form;
use crate::state::group::module_levels;

/// The memory of one module, in bytes.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    /// Parameters and buffers of this module and its submodules on each device, from io records.
    own: [BTreeMap<i32, i64>; 2],
    /// The bytes of the inputs of each kept call. `outputs` has the same for outputs.
    inputs: Vec<i64>,
    outputs: Vec<i64>,
    /// The maximum of the inputs and the maximum of the outputs over all calls.
    most: [i64; 2],
    /// True if io records have been counted for at least one call.
    has_calls: bool,
    /// From `tag` rows, for parameters and for buffers: the current bytes and their peak.
    tagged: [(i64, i64); 2],
    /// Like `tagged`, for the parameters of this module without its submodules.
    tagged_here: (i64, i64),
    /// The bytes of the parameters of each type: now, and at the peak of their sum.
    types: FxHashMap<Symbol, i64>,
    types_at_peak: FxHashMap<Symbol, i64>,
}

impl Memory {
    /// Returns the bytes of the module's parameters (`which` is 0) or buffers (1), from io records or,
    /// without them, from tags.
    fn own(&self, which: usize) -> i64 {
        if self.has_calls {
            self.own[which].values().fold(0, |sum: i64, bytes| sum.wrapping_add(*bytes))
        } else {
            self.tagged[which].1
        }
    }

    /// Returns the maximum over all calls of the inputs (`which` is 0) or outputs (1); `None` if unknown.
    fn largest_call(&self, which: usize) -> Option<i64> {
        self.has_calls.then_some(self.most[which])
    }

    /// Returns the bytes of the module's own parameters, without its submodules.
    pub(super) fn own_parameters(&self) -> i64 {
        self.tagged_here.1
    }

    /// Returns the bytes of the parameters of each known type when there were the most.
    pub(super) fn types(&self, symbols: &SymbolTable) -> BTreeMap<String, i64> {
        let known =
            self.types_at_peak.iter().filter(|(dtype, bytes)| !is_unknown_form(**dtype) && **bytes > 0);
        known.map(|(dtype, bytes)| (symbols.get(*dtype).to_string(), *bytes)).collect()
    }

    /// Returns parameters, buffers, inputs and outputs, for a table.
    pub(super) fn columns(&self) -> [Option<i64>; 4] {
        [Some(self.own(0)), Some(self.own(1)), self.largest_call(0), self.largest_call(1)]
    }

    /// Adds this memory to the JSON of a module. Inputs and outputs are lists with one entry for each kept
    /// call, or null if unknown.
    pub(super) fn add_to(&self, value: &mut Value, symbols: &SymbolTable) {
        let calls = |bytes: &Vec<i64>| if self.has_calls { json!(bytes) } else { Value::Null };
        value["parameter_bytes"] = self.own(0).into();
        value["own_parameter_bytes"] = self.own_parameters().into();
        value["parameter_types_bytes"] = json!(self.types(symbols));
        value["buffer_bytes"] = self.own(1).into();
        value["input_bytes"] = calls(&self.inputs);
        value["output_bytes"] = calls(&self.outputs);
    }

    fn add_call(&mut self, call: &CallMemory, keep: usize) {
        self.has_calls = true;
        let of_call = [(&mut self.inputs, call.inputs), (&mut self.outputs, call.outputs)];
        for ((all, bytes), most) in of_call.into_iter().zip(&mut self.most) {
            if all.len() < keep {
                all.push(bytes);
            }
            *most = (*most).max(bytes);
        }
    }
}

/// Inputs, outputs, parameters and buffers of one call.
#[derive(Clone, Debug, Default)]
pub(super) struct CallMemory {
    inputs: i64,
    outputs: i64,
    own: Vec<(usize, i32, i64)>,
}

/// The memory of all modules.
#[derive(Default)]
pub(super) struct Memories {
    by_path: FxHashMap<String, Memory>,
    /// The type of each live block of parameters, by its device and number.
    types: FxHashMap<(i32, i64), Symbol>,
    words: Option<[Symbol; 4]>,
    /// True if the trace has io records of modules.
    pub(super) has_io: bool,
}

impl Memories {
    /// Adds an io row inside a call to the memory of the call.
    pub(super) fn add_io(&mut self, call: &mut CallMemory, row: &Record, symbols: &SymbolTable) {
        let words = *self.words.get_or_insert_with(|| {
            [Api::ModuleParameters, Api::ModuleBuffers, Api::ModuleInputs, Api::ModuleOutputs]
                .map(|api| symbols.intern(api.as_str()))
        });
        let Some(which) = words.iter().position(|word| *word == row.api) else { return };
        self.has_io = true;
        match which {
            2 => call.inputs = call.inputs.wrapping_add(row.rounded_bytes),
            3 => call.outputs = call.outputs.wrapping_add(row.rounded_bytes),
            _ => call.own.push((which, row.device, row.rounded_bytes)),
        }
    }

    /// Adds the memory of a call that ends to its module. Does nothing if the trace has no io records of
    /// modules.
    pub(super) fn end_call(&mut self, path: &str, call: &CallMemory, keep: usize) {
        if !self.has_io {
            return;
        }
        let memory = self.by_path.entry(path.to_owned()).or_default();
        for (which, device, bytes) in &call.own {
            memory.own[*which].insert(*device, *bytes);
        }
        memory.add_call(call, keep);
    }

    /// Adds a row of a parameter's or buffer's block to its module and the enclosing modules.
    pub(super) fn add_block(&mut self, row: &Record, rounded: i64, symbols: &SymbolTable) {
        let which = match row.category {
            Category::Parameter => 0,
            Category::Buffer => 1,
            _ => return,
        };
        if !matches!(row.event, EventName::Tag | EventName::Free | EventName::Live) {
            return;
        }
        let block = (row.device, row.alloc_id);
        let dtype = if row.delta_bytes < 0 {
            self.types.remove(&block).unwrap_or(Symbol::UNKNOWN)
        } else {
            self.types.insert(block, row.dtype);
            row.dtype
        };
        let module = symbols.get(row.module);
        for path in module_levels(&module) {
            if !self.by_path.contains_key(path) {
                self.by_path.insert(path.to_owned(), Memory::default());
            }
            if let Some(memory) = self.by_path.get_mut(path) {
                let (now, most) = &mut memory.tagged[which];
                *now = now.wrapping_add(rounded);
                let is_peak = *now > *most;
                *most = (*most).max(*now);
                if which == 0 {
                    let bytes = memory.types.entry(dtype).or_default();
                    *bytes = bytes.wrapping_add(rounded);
                    if is_peak {
                        memory.types_at_peak.clone_from(&memory.types);
                    }
                }
                if which == 0 && path.len() == module.len() {
                    let (now, most) = &mut memory.tagged_here;
                    *now = now.wrapping_add(rounded);
                    *most = (*most).max(*now);
                }
            }
        }
    }

    /// Returns the memory of the module at `path`.
    pub(super) fn memory_at(&self, path: &str) -> Memory {
        self.by_path.get(path).cloned().unwrap_or_default()
    }
}

/// The note that is printed if the memory of the calls is unknown.
pub(super) const NO_IO: &str = "no inputs and outputs of calls in this trace (MEMTRACE_OPS=io records \
    them); only tagged parameters and buffers count, and a tied weight counts for its first module";
