//! The options of torchrun (`torch/distributed/run.py` of PyTorch 2.6 to 2.11) that affect the ranks.

use std::ffi::{OsStr, OsString};

use anyhow::{Result, bail};

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
    "local-rank-filter",
    "rdzv-timeout",
];
/// The options without a value.
const SWITCHES: [&str; 5] = ["standalone", "module", "no-python", "run-path", "virtual-local-rank"];

/// The number of ranks per node, as given to torchrun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PerNode {
    Number(u32),
    /// `gpu` or `auto`: one rank for each card.
    EachCard,
}

/// A command that starts the ranks of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Torchrun,
    /// `accelerate launch`, which starts the ranks with torchrun.
    Accelerate,
    /// `deepspeed`.
    DeepSpeed,
}

impl Kind {
    /// Returns the name of the launcher, and its options for the number of nodes and of ranks.
    pub(crate) fn words(self) -> (&'static str, &'static str) {
        match self {
            Kind::Torchrun => ("torchrun", "--nnodes and --nproc-per-node"),
            Kind::Accelerate => ("accelerate", "--num_machines and --num_processes"),
            Kind::DeepSpeed => ("deepspeed", "--num_nodes and --num_gpus"),
        }
    }
}

/// A command line of torchrun or of a similar launcher.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Torchrun {
    pub(crate) kind: Kind,
    /// The variables that the launcher sets for all ranks, in addition to the variables of each rank.
    pub(crate) variables: Vec<(String, String)>,
    pub(crate) nodes: u32,
    pub(crate) per_node: PerNode,
    pub(crate) role: String,
    pub(crate) rdzv_id: String,
    pub(crate) max_restarts: String,
    pub(crate) is_module: bool,
    pub(crate) without_python: bool,
    pub(crate) virtual_local_rank: bool,
    /// The script or module, and its arguments.
    pub(crate) script: Vec<OsString>,
}

impl Torchrun {
    /// Parses the arguments of torchrun. `variable` looks up the environment, because variables such as
    /// `PET_NNODES` set torchrun's defaults.
    ///
    /// # Errors
    /// When an option is unknown or has an invalid value, or no script is given.
    pub(crate) fn parse(
        arguments: &[&OsString],
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Torchrun> {
        let default = |name: &str, value: &str| variable(name).unwrap_or_else(|| value.to_owned());
        let is_set = |name: &str| variable(name).is_some_and(|value| value == "1");
        let mut nnodes = default("PET_NNODES", "1");
        let mut per_node = default("PET_NPROC_PER_NODE", "1");
        let mut torchrun = Torchrun {
            kind: Kind::Torchrun,
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
                    torchrun.script.push((*argument).clone());
                    torchrun.script.extend(rest.by_ref().map(|argument| (*argument).clone()));
                    break;
                }
                OptionWord::End => {
                    torchrun.script.extend(rest.by_ref().map(|argument| (*argument).clone()));
                    break;
                }
                OptionWord::Switch(name) => {
                    match name {
                        "module" => torchrun.is_module = true,
                        "no-python" => torchrun.without_python = true,
                        "virtual-local-rank" => torchrun.virtual_local_rank = true,
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
                "role" => torchrun.role = value,
                "rdzv-id" => torchrun.rdzv_id = value,
                "max-restarts" => torchrun.max_restarts = value,
                _ => {}
            }
        }
        torchrun.nodes = nodes(&nnodes)?;
        torchrun.per_node = match per_node.as_str() {
            "gpu" | "auto" => PerNode::EachCard,
            number => match number.parse() {
                Ok(number) if number > 0 => PerNode::Number(number),
                _ => bail!("torchrun: --nproc-per-node {per_node}: expected a number of ranks, gpu or auto"),
            },
        };
        if torchrun.script.is_empty() {
            bail!("torchrun: no script is named; for example: torchrun --nproc-per-node 8 train.py");
        }
        Ok(torchrun)
    }
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

/// The launcher that a command line names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Launcher<'a> {
    /// One of [`Kind`], with its arguments. `python` is the interpreter's command if the launcher was given
    /// to an interpreter; otherwise the first word is the launcher's path.
    Known { kind: Kind, arguments: &'a [&'a OsString], python: Option<&'a [&'a OsString]> },
    /// A launcher whose options this command does not know.
    Unknown(String),
    /// Another program, such as `env`, that starts torchrun. `--ranks` refuses it, because each rank would
    /// run the program, and its torchrun would start further ranks. The field is the name of the program.
    Behind(String),
    /// No launcher: the program takes its rank from the environment.
    None,
}

/// Finds the launcher of a command line.
pub(crate) fn launcher<'a>(command: &'a [&'a OsString]) -> Launcher<'a> {
    let name = |word: &OsStr| {
        std::path::Path::new(word).file_name().unwrap_or_default().to_string_lossy().into_owned()
    };
    let Some(program) = command.first().map(|program| name(program)) else { return Launcher::None };
    let script = |program: &str, at: usize, python| {
        let (kind, arguments) = kind_of_script(program, &command[at + 1..])?;
        Some(Launcher::Known { kind, arguments, python })
    };
    if let Some(known) = script(&program, 0, None) {
        return known;
    }
    const OTHERS: [&str; 11] = [
        "accelerate",
        "mpirun",
        "mpiexec",
        "srun",
        "horovodrun",
        "composer",
        "lightning",
        "fabric",
        "torchtune",
        "tune",
        "ray",
    ];
    if OTHERS.contains(&program.as_str()) {
        return Launcher::Unknown(program);
    }
    if !program.starts_with("python") && !program.starts_with("pypy") {
        // Another program, such as `env` or `uv run`, may start torchrun.
        let is_behind = command[1..].iter().any(|word| name(word) == "torchrun");
        return if is_behind { Launcher::Behind(program) } else { Launcher::None };
    }
    // `python -m MODULE`. Options of the interpreter may precede `-m`, and two of these options take a value.
    let mut at = 1;
    while let Some(word) = command.get(at) {
        let word = word.to_string_lossy();
        let (module, rest) = match word.strip_prefix("-m") {
            Some("") => (command.get(at + 1).map(|module| module.to_string_lossy().into_owned()), at + 2),
            Some(module) => (Some(module.to_owned()), at + 1),
            None if word == "-X" || word == "-W" => {
                at += 2;
                continue;
            }
            None if word.starts_with('-') && word != "-c" && word != "-" => {
                at += 1;
                continue;
            }
            // An interpreter was given a script. If it is `torchrun` or a similar script, the words before it
            // are the interpreter's command.
            None => {
                return script(&name(command[at]), at, Some(&command[..at])).unwrap_or(Launcher::None);
            }
        };
        let module = module.unwrap_or_default();
        if let Some((kind, arguments)) = kind_of_module(&module, command.get(rest..).unwrap_or(&[])) {
            return Launcher::Known { kind, arguments, python: Some(&command[..at]) };
        }
        return match module.as_str() {
            module @ ("torch.distributed.launch"
            | "accelerate.commands.accelerate_cli"
            | "deepspeed.launcher.launch") => Launcher::Unknown(format!("python -m {module}")),
            _ => Launcher::None,
        };
    }
    Launcher::None
}

/// Returns the launcher with this script name and its arguments, or `None` if the script is not one of
/// [`Kind`].
fn kind_of_script<'a>(name: &str, arguments: &'a [&'a OsString]) -> Option<(Kind, &'a [&'a OsString])> {
    match name {
        "torchrun" => Some((Kind::Torchrun, arguments)),
        "accelerate-launch" => Some((Kind::Accelerate, arguments)),
        "accelerate" if arguments.first().is_some_and(|word| *word == "launch") => {
            Some((Kind::Accelerate, &arguments[1..]))
        }
        "deepspeed" => Some((Kind::DeepSpeed, arguments)),
        _ => None,
    }
}

/// Returns the launcher in this Python module and its arguments, or `None` if the module is not one of
/// [`Kind`].
fn kind_of_module<'a>(module: &str, arguments: &'a [&'a OsString]) -> Option<(Kind, &'a [&'a OsString])> {
    match module {
        "torch.distributed.run" | "torch.distributed.torchrun" => Some((Kind::Torchrun, arguments)),
        "accelerate.commands.launch" => Some((Kind::Accelerate, arguments)),
        "accelerate.commands.accelerate_cli" => kind_of_script("accelerate", arguments),
        "deepspeed" | "deepspeed.launcher.runner" => Some((Kind::DeepSpeed, arguments)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split_whitespace().map(OsString::from).collect()
    }

    fn parsed(line: &str) -> Result<Torchrun> {
        let words = words(line);
        Torchrun::parse(&words.iter().collect::<Vec<_>>(), |_| None)
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
        let run = Torchrun::parse(&script.iter().collect::<Vec<_>>(), from).unwrap();
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

    #[test]
    fn the_launcher_of_a_command_line_is_found() {
        let kind = |line: &str| -> String {
            let words = words(line);
            match launcher(&words.iter().collect::<Vec<_>>()) {
                Launcher::Known { kind, arguments, python } => {
                    format!("{} {} {}", kind.words().0, python.map_or(0, <[_]>::len), arguments.len())
                }
                Launcher::Unknown(name) => name,
                Launcher::Behind(name) => format!("behind {name}"),
                Launcher::None => "none".to_owned(),
            }
        };
        assert_eq!(kind("/a/bin/torchrun --nnodes 2 t.py"), "torchrun 0 3");
        assert_eq!(kind("python3 -u -X dev -m torch.distributed.run --nnodes 2 t.py"), "torchrun 4 3");
        assert_eq!(kind("python -mtorch.distributed.run t.py"), "torchrun 1 1");
        assert_eq!(kind("python train.py -m torch.distributed.run"), "none");
        assert_eq!(kind("python -c pass"), "none");
        assert_eq!(kind("python -m pkg"), "none");
        assert_eq!(kind("accelerate launch --num_processes 2 t.py"), "accelerate 0 3");
        assert_eq!(kind("python -u /a/bin/accelerate launch t.py"), "accelerate 2 1");
        assert_eq!(kind("accelerate-launch t.py"), "accelerate 0 1");
        assert_eq!(kind("accelerate config"), "accelerate");
        assert_eq!(kind("python -m accelerate.commands.launch t.py"), "accelerate 1 1");
        assert_eq!(kind("python -m accelerate.commands.accelerate_cli launch t.py"), "accelerate 1 1");
        assert_eq!(
            kind("python -m accelerate.commands.accelerate_cli env"),
            "python -m accelerate.commands.accelerate_cli"
        );
        assert_eq!(kind("/a/bin/deepspeed --num_gpus 8 t.py"), "deepspeed 0 3");
        assert_eq!(kind("python -m deepspeed.launcher.runner t.py"), "deepspeed 1 1");
        assert_eq!(kind("python -m torch.distributed.launch t.py"), "python -m torch.distributed.launch");
        assert_eq!(kind("./train"), "none");
        assert_eq!(kind("uv run torchrun train.py"), "behind uv");
    }
}
