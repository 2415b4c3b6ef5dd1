//! The options of torchrun (`torch/distributed/run.py` of PyTorch 2.6 to 2.15) that affect the ranks.

use std::ffi::OsString;

use anyhow::{Result, bail};

use crate::cluster::launched_ranks::{LaunchedRanks, PerNode};
use crate::cluster::launcher::LauncherKind;

/// The options that take a value. Like argparse, this module accepts an abbreviated option if it is unique.
const VALUED: [&str; 26] = [
    "nnodes",
    "nproc-per-node",
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "event-log-handler",
    "role",
    "log-dir",
    "redirects",
    "tee",
    "local-ranks-filter",
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "node-rank",
    "master-addr",
    "master-port",
    "local-addr",
    "logs-specs",
    "numa-binding",
    "signals-to-handle",
    "log-line-prefix-template",
    "shutdown-timeout",
];
/// The options without a value.
const SWITCHES: [&str; 5] = ["standalone", "module", "no-python", "run-path", "virtual-local-rank"];

/// Parses the arguments of torchrun. `variable` looks up the environment, because variables such as
/// `PET_NNODES` set torchrun's defaults.
///
/// # Errors
/// When an option is unknown or has an invalid value, or no script is given.
pub(super) fn parse(
    arguments: &[&OsString],
    variable: impl Fn(&str) -> Option<String>,
) -> Result<LaunchedRanks> {
    let default = |name: &str, value: &str| variable(name).unwrap_or_else(|| value.to_owned());
    let is_set = |name: &str| variable(name).is_some_and(|value| value == "1");
    let mut nnodes = default("PET_NNODES", "1");
    let mut per_node = default("PET_NPROC_PER_NODE", "1");
    let mut launched = LaunchedRanks {
        launcher: LauncherKind::Torchrun,
        variables: Vec::new(),
        nodes: 1,
        per_node: PerNode::EachCard,
        role: default("PET_ROLE", "default"),
        rdzv_id: default("PET_RDZV_ID", "none"),
        max_restarts: default("PET_MAX_RESTARTS", "0"),
        is_module: is_set("PET_MODULE"),
        without_python: is_set("PET_NO_PYTHON"),
        virtual_local_rank: is_set("PET_VIRTUAL_LOCAL_RANK"),
        script: Vec::new(),
    };
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let text = argument.to_string_lossy();
        let (name, inline) = match option(&text)? {
            OptionWord::Script => {
                launched.script.push((*argument).clone());
                launched.script.extend(rest.by_ref().map(|argument| (*argument).clone()));
                break;
            }
            OptionWord::End => {
                launched.script.extend(rest.by_ref().map(|argument| (*argument).clone()));
                break;
            }
            OptionWord::Switch(name) => {
                match name {
                    "module" => launched.is_module = true,
                    "no-python" => launched.without_python = true,
                    "virtual-local-rank" => launched.virtual_local_rank = true,
                    _ => {}
                }
                continue;
            }
            OptionWord::Valued(name, inline) => (name, inline),
        };
        let next = || rest.next().map(|value| value.to_string_lossy().into_owned());
        let Some(value) = inline.or_else(next) else { bail!("torchrun: --{name} needs a value") };
        match name {
            "nnodes" => nnodes = value,
            "nproc-per-node" => per_node = value,
            "role" => launched.role = value,
            "rdzv-id" => launched.rdzv_id = value,
            "max-restarts" => launched.max_restarts = value,
            _ => {}
        }
    }
    launched.nodes = nodes(&nnodes)?;
    launched.per_node = match per_node.as_str() {
        "gpu" | "auto" => PerNode::EachCard,
        number => match number.parse() {
            Ok(number) if number > 0 => PerNode::Number(number),
            _ => bail!("torchrun: --nproc-per-node {per_node}: expected a number of ranks, gpu or auto"),
        },
    };
    if launched.script.is_empty() {
        bail!("torchrun: no script is named; for example: torchrun --nproc-per-node 8 train.py");
    }
    Ok(launched)
}

/// Parses the number of nodes: `64`, or a range with equal ends.
fn nodes(text: &str) -> Result<u32> {
    let number = |text: &str| text.parse::<u32>().ok().filter(|nodes| *nodes > 0);
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    match (number(least), number(most)) {
        (Some(least), Some(most)) if least == most => Ok(most),
        (Some(_), Some(_)) => bail!("torchrun: --nnodes {text}: name one number of nodes, such as {most}"),
        _ => bail!("torchrun: --nnodes {text}: expected a number of nodes"),
    }
}

/// What a word of the command line is: an option, the end of the options, or the script.
enum OptionWord {
    Switch(&'static str),
    /// An option that takes a value, and the value if the same word contains it (`--nnodes=2`).
    Valued(&'static str, Option<String>),
    /// `--`: the script follows.
    End,
    Script,
}

fn option(word: &str) -> Result<OptionWord> {
    if word == "--" {
        return Ok(OptionWord::End);
    }
    let Some(long) = word.strip_prefix("--") else {
        let mut letters = word.strip_prefix('-').unwrap_or_default().chars();
        let valued = |name, rest: &str| {
            let rest = rest.strip_prefix('=').unwrap_or(rest);
            OptionWord::Valued(name, (!rest.is_empty()).then(|| rest.to_owned()))
        };
        return Ok(match letters.next() {
            Some('r') => valued("redirects", letters.as_str()),
            Some('t') => valued("tee", letters.as_str()),
            Some('m') if letters.as_str().is_empty() => OptionWord::Switch("module"),
            Some(_) => bail!("torchrun: the option {word} is unknown to memtrace"),
            None => OptionWord::Script,
        });
    };
    let (name, value) = match long.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (long, None),
    };
    let name = name.replace('_', "-");
    let all = || VALUED.iter().chain(&SWITCHES);
    let exact: Vec<&&'static str> = all().filter(|known| **known == name).collect();
    let found =
        if exact.is_empty() { all().filter(|known| known.starts_with(&name)).collect() } else { exact };
    match found[..] {
        [known] if SWITCHES.contains(known) => Ok(OptionWord::Switch(known)),
        [known] => Ok(OptionWord::Valued(known, value)),
        _ => bail!("torchrun: the option {word} is unknown to memtrace"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    fn parsed(line: &str) -> Result<LaunchedRanks> {
        let words = words(line);
        parse(&words.iter().collect::<Vec<_>>(), |_| None)
    }

    #[test]
    fn torchrun_options_are_read_as_torchrun_reads_them() {
        let run = parsed("--nnodes 64 --nproc_per_node=8 train.py --nnodes 3").unwrap();
        assert_eq!((run.nodes, run.per_node), (64, PerNode::Number(8)));
        assert_eq!(run.script, words("train.py --nnodes 3"));
        let run = parsed("--standalone --nproc=gpu --rdzv-b c10d -r 3 -t3 -m pkg.train -m x").unwrap();
        assert_eq!((run.nodes, run.per_node, run.is_module), (1, PerNode::EachCard, true));
        assert_eq!(run.script, words("pkg.train -m x"));
        let run = parsed("--nnodes 2:2 --role trainer --rdzv_id 77 --no-python -- ./run.sh").unwrap();
        assert_eq!((run.nodes, run.role.as_str(), run.rdzv_id.as_str()), (2, "trainer", "77"));
        assert!(run.without_python);
        let script = words("train.py");
        let from = |name: &str| (name == "PET_NPROC_PER_NODE").then(|| "4".to_owned());
        let run = parse(&script.iter().collect::<Vec<_>>(), from).unwrap();
        assert_eq!(run.per_node, PerNode::Number(4));
    }

    #[test]
    fn invalid_torchrun_options_are_refused_with_the_reason() {
        for (line, part) in [
            ("", "no script is named"),
            ("--nnodes 2", "no script is named"),
            ("--nnodes 1:4 train.py", "name one number of nodes, such as 4"),
            ("--nnodes many train.py", "expected a number of nodes"),
            ("--nnodes 0 train.py", "expected a number of nodes"),
            ("--nproc-per-node 0 train.py", "expected a number of ranks"),
            ("--nproc-per-node cpu train.py", "expected a number of ranks"),
            ("--nproc-per-node", "needs a value"),
            ("--fast train.py", "--fast is unknown"),
            ("-x train.py", "-x is unknown"),
            ("--rdzv x train.py", "--rdzv is unknown"),
        ] {
            let error = parsed(line).unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
