//! Finds the launcher of a distributed job in a command line: torchrun, accelerate or deepspeed.

use std::ffi::{OsStr, OsString};

/// A command that starts the ranks of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LauncherKind {
    Torchrun,
    /// `accelerate launch`, which starts the ranks with torchrun.
    Accelerate,
    /// `deepspeed`.
    DeepSpeed,
}

impl LauncherKind {
    /// Returns the name of the launcher, and its options for the number of nodes and of ranks.
    pub(crate) fn words(self) -> (&'static str, &'static str) {
        match self {
            LauncherKind::Torchrun => ("torchrun", "--nnodes and --nproc-per-node"),
            LauncherKind::Accelerate => ("accelerate", "--num_machines and --num_processes"),
            LauncherKind::DeepSpeed => ("deepspeed", "--num_nodes and --num_gpus"),
        }
    }
}

/// The launcher that a command line names.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Launcher<'a> {
    /// One of [`LauncherKind`], with its arguments. `python` is the interpreter's command if the launcher was given
    /// to an interpreter; otherwise the first word is the launcher's path.
    Known { kind: LauncherKind, arguments: &'a [&'a OsString], python: Option<&'a [&'a OsString]> },
    /// A launcher whose options this command does not know.
    Unknown(String),
    /// Another program, such as `env`, that starts a launcher. `--ranks` refuses it, because each rank would
    /// run the program, and its launcher would start further ranks. The first field is the name of the program,
    /// and the second the name of the launcher.
    Wrapped(String, &'static str),
    /// No launcher: the program takes its rank from the environment.
    None,
}

/// Returns the file name of a word.
fn name(word: &OsStr) -> String {
    std::path::Path::new(word).file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Finds the launcher of a command line.
pub(crate) fn launcher<'a>(command: &'a [&'a OsString]) -> Launcher<'a> {
    let Some(program) = command.first().map(|program| name(program)) else { return Launcher::None };
    let script = |program: &str, at: usize, python| {
        let (kind, arguments) = kind_of_script(program, &command[at + 1..])?;
        Some(Launcher::Known { kind, arguments, python })
    };
    if let Some(known) = script(&program, 0, None) {
        return known;
    }
    if is_unknown_program(&program) {
        return Launcher::Unknown(program);
    }
    if !program.starts_with("python") && !program.starts_with("pypy") {
        // Another program, such as `env` or `uv run`, may start a launcher.
        let known = (1..command.len()).find_map(|at| kind_at(command, at));
        return match known {
            Some(kind) => Launcher::Wrapped(program, kind.words().0),
            None => wrapped_unknown(command).map_or(Launcher::None, Launcher::Unknown),
        };
    }
    // `python -m MODULE`. Options of the interpreter may precede `-m`, and two of these options take a value.
    let mut at = 1;
    while let Some(word) = command.get(at) {
        let word = word.to_string_lossy();
        // `-um MODULE` is `-u -m MODULE`.
        let flags =
            word.find('m').filter(|at| word[..*at].strip_prefix('-').is_some_and(is_flags)).map(|at| at + 1);
        let (module, rest) = match flags.map(|end| &word[end..]) {
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
        return match is_unknown_module(&module) {
            true => Launcher::Unknown(format!("python -m {module}")),
            false => Launcher::None,
        };
    }
    Launcher::None
}

/// Returns true for options of the interpreter without a value, written as one word (`uB` of `-uB`).
fn is_flags(letters: &str) -> bool {
    letters.chars().all(|letter| "bBdEhiIOPqsSuvVx".contains(letter))
}

/// Programs that start ranks and whose options this command does not know. The names have no other use.
const UNKNOWN_PROGRAMS: [&str; 5] = ["mpirun", "mpiexec", "srun", "horovodrun", "torchtune"];
/// The same, for names that are also ordinary words.
const UNKNOWN_WORDS: [&str; 6] = ["accelerate", "composer", "lightning", "fabric", "tune", "ray"];

fn is_unknown_program(name: &str) -> bool {
    UNKNOWN_PROGRAMS.contains(&name) || UNKNOWN_WORDS.contains(&name)
}

/// Returns true if a Python module starts ranks, but is not one of [`LauncherKind`].
fn is_unknown_module(module: &str) -> bool {
    ["torch.distributed.launch", "accelerate.commands.accelerate_cli", "deepspeed.launcher.launch"]
        .contains(&module)
}

/// Returns the launcher with unknown options that a program such as `env` starts. An ordinary word counts only if a
/// script follows, and not after an option, whose value it may be, as in `conda run -n ray`. What follows a script
/// belongs to the script.
fn wrapped_unknown(command: &[&OsString]) -> Option<String> {
    let is_script = |word: &OsString| [".py", ".sh"].iter().any(|end| name(word).ends_with(end));
    let before_script = command.iter().take_while(|word| !is_script(word));
    let words: Vec<String> = before_script.map(|word| word.to_string_lossy().into_owned()).collect();
    let has_script = words.len() < command.len();
    words.windows(2).find_map(|pair| {
        let [before, word] = pair else { return None };
        let (program, module) = (name(word.as_ref()), word.strip_prefix("-m").unwrap_or(word));
        let may_be_value = before.starts_with('-') && !before.contains('=');
        if (before == "-m" || word.starts_with("-m")) && is_unknown_module(module) {
            return Some(format!("python -m {module}"));
        }
        let is_program = UNKNOWN_PROGRAMS.contains(&program.as_str())
            || UNKNOWN_WORDS.contains(&program.as_str()) && has_script && !may_be_value;
        is_program.then_some(program)
    })
}

/// Returns the launcher that starts at the word `at`, as a program, or as a module after `-m`. The word `deepspeed`
/// can also be the value of an option, so it counts only if a script follows.
fn kind_at(command: &[&OsString], at: usize) -> Option<LauncherKind> {
    let (word, rest) = (command[at], &command[at + 1..]);
    let module = if command[at - 1] == "-m" {
        Some(word.to_string_lossy())
    } else {
        word.to_str().and_then(|word| word.strip_prefix("-m")).map(Into::into)
    };
    let has_script = rest.iter().any(|word| name(word).ends_with(".py") || *word == "--module");
    let of_script = || {
        kind_of_script(&name(word), rest).filter(|(kind, _)| *kind != LauncherKind::DeepSpeed || has_script)
    };
    let of_module = module.and_then(|module| kind_of_module(&module, rest));
    of_module.or_else(of_script).map(|(kind, _)| kind)
}

/// Returns the launcher with this script name and its arguments, or `None` if the script is not one of
/// [`LauncherKind`].
fn kind_of_script<'a>(
    name: &str,
    arguments: &'a [&'a OsString],
) -> Option<(LauncherKind, &'a [&'a OsString])> {
    match name {
        "torchrun" => Some((LauncherKind::Torchrun, arguments)),
        "accelerate-launch" => Some((LauncherKind::Accelerate, arguments)),
        "accelerate" if arguments.first().is_some_and(|word| *word == "launch") => {
            Some((LauncherKind::Accelerate, &arguments[1..]))
        }
        "deepspeed" => Some((LauncherKind::DeepSpeed, arguments)),
        _ => None,
    }
}

/// Returns the launcher in this Python module and its arguments, or `None` if the module is not one of
/// [`LauncherKind`].
fn kind_of_module<'a>(
    module: &str,
    arguments: &'a [&'a OsString],
) -> Option<(LauncherKind, &'a [&'a OsString])> {
    match module {
        "torch.distributed.run" | "torch.distributed.torchrun" => Some((LauncherKind::Torchrun, arguments)),
        "accelerate.commands.launch" => Some((LauncherKind::Accelerate, arguments)),
        "accelerate.commands.accelerate_cli" => kind_of_script("accelerate", arguments),
        "deepspeed" | "deepspeed.launcher.runner" => Some((LauncherKind::DeepSpeed, arguments)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_launcher_of_a_command_line_is_found() {
        let kind = |line: &str| -> String {
            let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
            match launcher(&words.iter().collect::<Vec<_>>()) {
                Launcher::Known { kind, arguments, python } => {
                    format!("{} {} {}", kind.words().0, python.map_or(0, <[_]>::len), arguments.len())
                }
                Launcher::Unknown(name) => name,
                Launcher::Wrapped(name, launcher) => format!("{launcher} in {name}"),
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
        assert_eq!(kind("uv run torchrun train.py"), "torchrun in uv");
        assert_eq!(kind("uv run accelerate launch --num_processes 8 t.py"), "accelerate in uv");
        assert_eq!(kind("env A=1 python -m torch.distributed.run t.py"), "torchrun in env");
        assert_eq!(kind("env python -maccelerate.commands.launch t.py"), "accelerate in env");
        assert_eq!(kind("uv run /a/bin/deepspeed t.py"), "deepspeed in uv");
        assert_eq!(kind("uv run train.py --strategy deepspeed --backend accelerate"), "none");
        assert_eq!(kind("env A=1 mpirun -n 8 python t.py"), "mpirun");
        assert_eq!(kind("numactl -N 0 /a/bin/srun -n 8 ./train"), "srun");
        assert_eq!(kind("uv run composer -n 8 t.py"), "composer");
        assert_eq!(
            kind("uv run python -m torch.distributed.launch t.py"),
            "python -m torch.distributed.launch"
        );
        assert_eq!(
            kind("env python -mdeepspeed.launcher.launch t.py"),
            "python -m deepspeed.launcher.launch"
        );
        assert_eq!(kind("python -um torch.distributed.launch"), "python -m torch.distributed.launch");
        assert_eq!(kind("python -uBmtorch.distributed.launch"), "python -m torch.distributed.launch");
        assert_eq!(kind("python -Xm torch.distributed.launch"), "none");
        assert_eq!(kind("conda run -n ray python t.py"), "none");
        assert_eq!(kind("bash train.sh tune"), "none");
        assert_eq!(kind("./train.sh ray"), "none");
        assert_eq!(kind("env python -m pkg.train tune"), "none");
        assert_eq!(kind("uv run t.py --launcher mpirun ray"), "none");
        assert_eq!(kind("env LAUNCHER=mpirun python t.py"), "none");
    }
}
