//! The ranks of `accelerate launch`, which resolves its options, its configuration file and its defaults
//! itself, and starts the ranks through torchrun. So memtrace asks it for the torchrun arguments and the
//! variables that it would use.

use std::ffi::OsString;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::cluster::launched_ranks::LaunchedRanks;
use crate::cluster::launcher::LauncherKind;
use crate::cluster::torchrun;

const ASK: &str = include_str!("python/accelerate_launch.py");

/// Returns the ranks that `accelerate launch` with these arguments would start on nodes with `cards` cards.
/// `python` is the interpreter with its options.
///
/// # Errors
/// When `accelerate launch` refuses the arguments or would start no ranks. Its messages are then on stderr.
pub(super) fn ask(python: &[OsString], arguments: &[&OsString], cards: u32) -> Result<LaunchedRanks> {
    let (program, options) = python.split_first().context("accelerate: no interpreter")?;
    let mut command = Command::new(program);
    command.args(options).args(["-c", ASK]).arg(cards.to_string()).args(arguments);
    let output = command
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("cannot start {}", program.to_string_lossy()))?;
    if !output.status.success() {
        bail!(
            "--ranks: accelerate launch did not list the ranks that it would start; see its messages above"
        );
    }
    let answer: Value = serde_json::from_slice(&output.stdout)
        .context("--ranks: cannot read the list of ranks from accelerate launch")?;
    let words = answer["arguments"].as_array().context("accelerate launch: no arguments of torchrun")?;
    let words: Vec<OsString> = words.iter().filter_map(Value::as_str).map(OsString::from).collect();
    let launched = torchrun::parse(&words.iter().collect::<Vec<_>>(), |_| None)?;
    let variables = answer["variables"].as_object().into_iter().flatten();
    let variables = variables.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned())));
    Ok(LaunchedRanks { launcher: LauncherKind::Accelerate, variables: variables.collect(), ..launched })
}
