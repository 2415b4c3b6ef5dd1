//! The module that a Python call stack names.
//!
//! A snapshot has no module names. A module is therefore named by the calls in the stack: each call of a
//! module becomes one level of the path. A level is the file of the module's `forward`, followed by the line of
//! the code that calls the module. The outermost level has no line, so that training and evaluation share it.

use rustc_hash::FxHashMap;

/// The maximum number of levels of a path.
const DEEPEST_MODULE: usize = 32;
/// The maximum size of all paths together, in bytes. Further modules count for the module that calls them.
const MOST_PATHS: usize = 8 << 20;

/// The role of a frame in the call of a module.
#[derive(Clone, Debug, Default)]
pub(super) enum CallFrame {
    /// Neither Python nor part of a call.
    #[default]
    Other,
    /// A frame of `Module.__call__`.
    Call,
    /// Another line of Python.
    Line { level: Box<str>, line: i64, is_forward: bool },
}

impl CallFrame {
    /// Returns the role of a Python frame.
    pub(super) fn from_frame(name: &str, file: &str, line: i64) -> CallFrame {
        if file.ends_with("torch/nn/modules/module.py") {
            return if name.ends_with("_call_impl") { CallFrame::Call } else { CallFrame::Other };
        }
        let is_forward = name == "forward" || name.ends_with(".forward");
        // Python 3.11 and later may provide the qualified name, which has the class.
        let class = name.rsplit('.').nth(1).filter(|class| is_forward && !class.contains('<'));
        let file = file.rsplit('/').next().unwrap_or(file);
        let level = class.unwrap_or(file.strip_suffix(".py").unwrap_or(file));
        CallFrame::Line { level: level.replace('.', "_").into_boxed_str(), line, is_forward }
    }
}

/// The paths of all modules of a snapshot.
#[derive(Debug, Default)]
pub(super) struct Modules {
    /// The path of each module. Module 0 means no module and is not stored.
    paths: Vec<Box<str>>,
    by_path: FxHashMap<Box<str>, u32>,
    bytes: usize,
}

impl Modules {
    /// Returns the index of the innermost module that a stack calls, or 0. `places` are the frames, outermost
    /// first.
    pub(super) fn innermost<'a>(&mut self, places: impl Iterator<Item = &'a CallFrame>) -> u32 {
        let mut path = String::new();
        let mut levels = 0;
        let mut module = 0;
        // The line that contains the last call, and the first line inside the call that has no level yet.
        let (mut caller, mut entered): (Option<i64>, Option<&str>) = (None, None);
        let mut in_call = false;
        let mut call = None;
        let mut enter = |path: &mut String, level: &str, call: Option<i64>, module: &mut u32| {
            levels += 1;
            if levels > DEEPEST_MODULE {
                return;
            }
            if let Some(line) = call.filter(|_| !path.is_empty()) {
                path.extend([".", level, "@", &line.to_string()]);
            } else if path.is_empty() {
                path.push_str(level);
            }
            *module = self.intern(path).unwrap_or(*module);
        };
        for place in places {
            match place {
                CallFrame::Other => {}
                CallFrame::Call => {
                    // `_wrapped_call_impl` and `_call_impl` are one call.
                    if let Some(level) = entered.take() {
                        enter(&mut path, level, call, &mut module);
                        in_call = false;
                    }
                    if !in_call {
                        (in_call, call) = (true, caller);
                    }
                }
                CallFrame::Line { level, line, is_forward } => {
                    caller = Some(*line);
                    if in_call && *is_forward {
                        entered = None;
                        in_call = false;
                        enter(&mut path, level, call, &mut module);
                    } else if in_call && entered.is_none() {
                        entered = Some(level);
                    }
                }
            }
        }
        if let Some(level) = entered {
            enter(&mut path, level, call, &mut module);
        }
        module
    }

    fn intern(&mut self, path: &str) -> Option<u32> {
        if let Some(index) = self.by_path.get(path) {
            return Some(*index);
        }
        if self.bytes + path.len() > MOST_PATHS {
            return None;
        }
        self.bytes += path.len();
        self.paths.push(path.into());
        let index = self.paths.len() as u32;
        self.by_path.insert(path.into(), index);
        Some(index)
    }

    /// Returns the path of a module, or `None` for index 0.
    pub(super) fn path(&self, module: u32) -> Option<&str> {
        self.paths.get((module as usize).checked_sub(1)?).map(|path| &**path)
    }

    /// Returns the number of modules.
    pub(super) fn count(&self) -> usize {
        self.paths.len()
    }
}

#[cfg(test)]
mod tests {
    use super::{CallFrame, Modules};

    const TORCH: &str = "/x/torch/nn/modules/module.py";

    fn path_of(frames: &[(&str, &str, i64)]) -> String {
        let places: Vec<CallFrame> =
            frames.iter().map(|(name, file, line)| CallFrame::from_frame(name, file, *line)).collect();
        let mut modules = Modules::default();
        let module = modules.innermost(places.iter());
        modules.path(module).unwrap_or_default().to_owned()
    }

    #[test]
    fn a_path_has_a_level_for_each_call_with_the_line_of_the_caller() {
        let call = |line| [("_wrapped_call_impl", TORCH, 1), ("_call_impl", TORCH, line)];
        let [outer, inner] = [call(2), call(3)];
        let frames = [
            &[("<module>", "/a/train.py", 50)],
            &outer[..],
            &[("forward", "/a/net.v2.py", 16), ("run_block", "/a/net.v2.py", 70)],
            &inner[..],
            &[("forward", "/x/torch/nn/modules/linear.py", 125)],
        ];
        assert_eq!(path_of(&frames.concat()), "net_v2.linear@70");
        assert_eq!(path_of(&frames[..1].concat()), "");
        assert_eq!(path_of(&frames[..4].concat()), "net_v2");
    }

    #[test]
    fn a_wrapper_around_forward_is_no_level_and_a_module_without_forward_is_one() {
        let call = ("_call_impl", TORCH, 1);
        let hooked = ("new_forward", "/x/accelerate/hooks.py", 166);
        let forward = ("Llama.forward", "/x/llama.py", 9);
        assert_eq!(path_of(&[call, hooked, forward]), "Llama");
        assert_eq!(path_of(&[call, hooked]), "hooks");
        assert_eq!(path_of(&[call, hooked, call, forward]), "hooks.Llama@166");
    }

    #[test]
    fn the_levels_of_a_recursive_module_are_bounded() {
        let frames = [("_call_impl", TORCH, 1), ("forward", "/x/net.py", 7)].repeat(5000);
        let path = path_of(&frames);
        assert_eq!(path.split('.').count(), super::DEEPEST_MODULE);
    }
}
