//! The tools, made from the definitions of the commands: their names, options and help texts.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, ArgAction, Command, value_parser};
use rmcp::model::{Tool, ToolAnnotations};
use serde_json::{Map, Value, json};

use super::folders::Folders;
use crate::args::{DEFAULT_FOLDER, END_WITH_PARENT};

/// The arguments of a call.
pub(super) type Arguments = Map<String, Value>;

/// The tool that lists the runs. It has no command.
pub(super) const LIST_RUNS: &str = "list_runs";

/// The commands that only read, except that they complete the trace of a killed process, as the command line does.
/// `tune` also starts Python, which repeats the requests.
const READING: &[&str] = &[
    "summary", "peak", "oom", "leaks", "frag", "ledger", "serving", "timeline", "modules", "ops", "advise",
    "tune", "diff", "budget", "ranks", "check", "help",
];

/// The commands that run a program or write a file.
const RUNNING: &[&str] = &["run", "fit", "report", "export"];

/// The options that no tool has, because they need a terminal, run another program, change a trace, or talk to a
/// running process.
const HIDDEN: &[&str] = &[
    "color",
    "format",
    "width",
    "help",
    "python",
    "pid",
    "repair",
    "wait",
    "completions",
    "man",
    "lenient",
    END_WITH_PARENT,
];

/// The options that name a file to write. Only the tools of [`RUNNING`] have them.
const WRITTEN: &[&str] = &["output", "out", "write"];

/// Value names of the options that name a file to read.
const FILES: &[&str] = &["FILE", "PATH", "DIR", "TRACE"];

/// The commands of the tools.
pub(super) struct Tools {
    commands: Vec<Command>,
}

impl Tools {
    /// Creates the tools from `all`, the command line of `memtrace`; with `may_run`, also those that run a program or
    /// write a file.
    pub(super) fn new(mut all: Command, may_run: bool) -> Tools {
        all.build();
        let is_tool = |name: &str| READING.contains(&name) || may_run && RUNNING.contains(&name);
        Tools { commands: all.get_subcommands().filter(|one| is_tool(one.get_name())).cloned().collect() }
    }

    /// Returns the definitions of all tools.
    pub(super) fn all(&self) -> Vec<Tool> {
        let list = Tool::new(
            LIST_RUNS,
            "List the traces and PyTorch snapshots that the other tools can read, the newest first",
            schema(Map::new(), &[]),
        );
        let reads = ToolAnnotations::new().read_only(true).open_world(false);
        let completes = ToolAnnotations::new().read_only(false).destructive(false).open_world(false);
        let mut tools = vec![list.with_annotations(reads)];
        tools.extend(self.commands.iter().map(|command| {
            let name = command.get_name().to_owned();
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            let annotations = match RUNNING.contains(&&*name) {
                true => ToolAnnotations::new().read_only(false).destructive(true),
                false => completes.clone(),
            };
            let properties = options(command).map(|arg| (key(arg), property(arg))).collect();
            let required: Vec<String> =
                options(command).filter(|arg| arg.is_required_set()).map(key).collect();
            Tool::new(name, about, schema(properties, &required)).with_annotations(annotations)
        }));
        tools
    }

    /// Returns the flag that ends a command when this server is killed, if the command has it.
    pub(super) fn ending_flag(&self, name: &str) -> Option<OsString> {
        let command = self.commands.iter().find(|command| command.get_name() == name)?;
        let has_it = command.get_arguments().any(|arg| arg.get_id() == END_WITH_PARENT);
        has_it.then(|| format!("--{END_WITH_PARENT}={}", std::process::id()).into())
    }

    /// Returns the command line of a call, without `memtrace`, the name of the command and
    /// [`Self::ending_flag`].
    ///
    /// # Errors
    /// When there is no such tool or option, a value has the wrong type, or a path is not allowed.
    pub(super) fn command_line(
        &self,
        name: &str,
        arguments: &Arguments,
        folders: &Folders,
    ) -> Result<Vec<OsString>, String> {
        let Some(command) = self.commands.iter().find(|command| command.get_name() == name) else {
            let names: Vec<&str> = self.commands.iter().map(Command::get_name).collect();
            let why =
                if RUNNING.contains(&name) { "; this server was started without --allow-run" } else { "" };
            return Err(format!("no tool {name:?}{why}; there are {LIST_RUNS}, {}", names.join(", ")));
        };
        let (mut flags, mut positional) = (Vec::new(), Vec::new());
        for (given, value) in arguments {
            let Some(arg) = options(command).find(|arg| key(arg) == *given) else {
                let keys: Vec<String> = options(command).map(key).collect();
                return Err(format!("{name} has no argument {given:?}; it has {}", keys.join(", ")));
            };
            for text in values(arg, value)? {
                let text = match is_path(arg) {
                    true => {
                        folders.allowed(&text, WRITTEN.contains(&arg.get_id().as_str()))?.into_os_string()
                    }
                    false => OsString::from(text),
                };
                match arg.get_long() {
                    _ if arg.is_positional() => positional.push((arg.get_index(), text)),
                    // One word, so that a value which begins with `-` is no option.
                    Some(long) if takes_value(arg) => {
                        let mut word = OsString::from(format!("--{long}="));
                        word.push(text);
                        flags.push(word);
                    }
                    Some(long) => flags.push(format!("--{long}").into()),
                    None => {}
                }
            }
        }
        positional.sort_by_key(|(index, _)| *index);
        let reads_default =
            positional.is_empty() && options(command).any(|arg| arg.is_positional() && is_path(arg));
        if reads_default && folders.first().join(DEFAULT_FOLDER).exists() {
            folders.allowed(DEFAULT_FOLDER, false)?;
        }
        if !positional.is_empty() {
            flags.push("--".into());
        }
        flags.extend(positional.into_iter().map(|(_, text)| text));
        Ok(flags)
    }
}

/// Returns the arguments of a command that its tool has.
fn options(command: &Command) -> impl Iterator<Item = &Arg> {
    let may_write = RUNNING.contains(&command.get_name());
    command.get_arguments().filter(move |arg| {
        let id = arg.get_id().as_str();
        !HIDDEN.contains(&id) && (may_write || !WRITTEN.contains(&id))
    })
}

/// Returns the name of an argument in a call.
fn key(arg: &Arg) -> String {
    arg.get_long().map_or_else(|| arg.get_id().as_str().to_lowercase(), str::to_owned)
}

fn takes_value(arg: &Arg) -> bool {
    !matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::SetFalse | ArgAction::Count)
}

fn takes_many(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
        || arg.get_num_args().is_some_and(|range| range.max_values() > 1)
}

/// Returns true if the argument names a file or a folder.
fn is_path(arg: &Arg) -> bool {
    let is_path = arg.get_value_parser().type_id() == value_parser!(PathBuf).type_id();
    let names = arg.get_value_names().unwrap_or_default();
    takes_value(arg) && (is_path || names.iter().any(|name| FILES.contains(&name.as_str())))
}

/// Returns the JSON Schema of an argument.
fn property(arg: &Arg) -> Value {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let value = match takes_value(arg) {
        false => json!({"type": "boolean"}),
        true => {
            let choices: Vec<String> =
                arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
            match choices.is_empty() {
                true => json!({"type": ["string", "number"]}),
                false => json!({"type": "string", "enum": choices}),
            }
        }
    };
    let mut property = match takes_many(arg) {
        true => json!({"type": "array", "items": value}),
        false => value,
    };
    property["description"] = help.into();
    property
}

fn schema(mut properties: Map<String, Value>, required: &[String]) -> Map<String, Value> {
    properties.insert(
        "offset".to_owned(),
        json!({"type": "integer", "minimum": 0, "description": "Continue a long answer at this character"}),
    );
    let schema = json!({
        "type": "object", "properties": properties, "required": required, "additionalProperties": false,
    });
    schema.as_object().cloned().unwrap_or_default()
}

/// Returns the values of an argument as texts; a switch that is on has one, which is empty.
fn values(arg: &Arg, value: &Value) -> Result<Vec<String>, String> {
    match value {
        Value::Null | Value::Bool(false) => Ok(Vec::new()),
        Value::Bool(true) if !takes_value(arg) => Ok(vec![String::new()]),
        Value::Array(all) if takes_many(arg) => all.iter().map(|value| text(arg, value)).collect(),
        value => Ok(vec![text(arg, value)?]),
    }
}

/// Returns a whole number, also from `2.0` or `1e3`, which are integers in JSON Schema.
pub(super) fn whole(value: &Value) -> Option<i64> {
    let is_whole =
        |number: &f64| number.fract() == 0.0 && number.abs() < (1_u64 << f64::MANTISSA_DIGITS) as f64;
    value.as_i64().or_else(|| value.as_f64().filter(is_whole).map(|number| number as i64))
}

fn text(arg: &Arg, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) if takes_value(arg) && !text.contains('\0') => Ok(text.clone()),
        Value::Number(number) if takes_value(arg) => {
            Ok(whole(value).map_or_else(|| number.to_string(), |whole| whole.to_string()))
        }
        _ => Err(format!("{}: {value} is not what the schema of this tool asks for", key(arg))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(tools: &Tools, name: &str, arguments: Value) -> Result<Vec<OsString>, String> {
        let folders = Folders::new([std::path::Path::new("/proc/self/fd")].into_iter()).unwrap();
        tools.command_line(name, arguments.as_object().unwrap(), &folders)
    }

    #[test]
    fn every_report_is_a_tool_and_no_reading_tool_runs_or_writes() {
        let names: Vec<&str> = READING.iter().chain(RUNNING).copied().collect();
        for report in memtrace_analysis::reports::REPORTS {
            assert!(names.contains(&report.name()), "{} is no tool", report.name());
        }
        let tools = Tools::new(crate::commands::command(), true);
        assert_eq!(tools.commands.len(), names.len(), "a tool has no command");
        let reading = Tools::new(crate::commands::command(), false);
        for command in &reading.commands {
            for arg in options(command).filter(|arg| takes_value(arg)) {
                let name = key(arg);
                assert!(
                    !["output", "out", "write", "python", "pid"].contains(&&*name),
                    "{}",
                    command.get_name()
                );
                let is_read = ["trace", "before", "after", "against", "limits"].contains(&&*name);
                assert_eq!(is_path(arg), is_read, "{} {name}: is it a path?", command.get_name());
            }
        }
        assert!(line(&reading, "run", json!({"command": ["true"]})).unwrap_err().contains("--allow-run"));
        assert!(line(&reading, "peak", json!({"output": "x"})).unwrap_err().contains("no argument"));
    }

    #[test]
    fn arguments_are_words_of_the_command_line() {
        let tools = Tools::new(crate::commands::command(), true);
        let words =
            line(&tools, "peak", json!({"by": "module", "json": true, "top": 3, "step": "-1"})).unwrap();
        assert_eq!(words.len(), 4);
        for word in ["--by=module", "--json", "--top=3", "--step=-1"] {
            assert!(words.contains(&word.into()), "{words:?}");
        }
        for (number, word) in
            [("2.0", "--top=2"), ("1e3", "--top=1000"), ("0.5", "--top=0.5"), ("-7", "--top=-7")]
        {
            let number: Value = serde_json::from_str(number).unwrap();
            assert_eq!(line(&tools, "peak", json!({"top": number})).unwrap(), [word]);
        }
        let words =
            line(&tools, "run", json!({"command": ["python", "--phantom"], "phantom": "t4"})).unwrap();
        assert_eq!(words, ["--phantom=t4", "--", "python", "--phantom"]);
        for (arguments, why) in [
            (json!({"json": "yes"}), "json: \"yes\" is not"),
            (json!({"top": {}}), "top: {} is not"),
            (json!({"by": "a\0b"}), "by: "),
            (json!({"trace": "/etc"}), "outside the folders"),
            (json!({"nothing": 1}), "it has trace, "),
        ] {
            let said = line(&tools, "peak", arguments).unwrap_err();
            assert!(said.contains(why), "{said}");
        }
    }
}
