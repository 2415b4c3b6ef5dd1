//! The options of `deepspeed` (`deepspeed/launcher/runner.py` of 0.19) that affect the ranks.

use std::ffi::OsString;
use std::fs;

use anyhow::{Context, Result, bail};

use crate::cluster::launched_ranks::{LaunchedRanks, PerNode};
use crate::cluster::launcher::LauncherKind;

/// The options that take a value but do not affect the ranks.
const IGNORED: [&str; 12] = [
    "master_port",
    "master_addr",
    "node_rank",
    "launcher",
    "launcher_args",
    "enable_each_rank_log",
    "bind_core_list",
    "ssh_port",
    "comment",
    "account",
    "venv_script",
    "log_level",
];
const SWITCHES: [&str; 9] = [
    "module",
    "no_python",
    "no_local_rank",
    "no_ssh",
    "no_ssh_check",
    "force_multi",
    "save_pid",
    "quiet",
    "bind_cores_to_rank",
];

/// Parses the arguments of `deepspeed`.
///
/// # Errors
/// When an option is unknown, has an invalid value, or selects single cards or hosts, or when no script is
/// given.
pub(super) fn parse(arguments: &[&OsString]) -> Result<LaunchedRanks> {
    let (mut nodes, mut cards, mut hosts) = (None, None, None);
    let (mut is_module, mut without_python, mut has_local_rank) = (false, false, true);
    let mut rest = arguments.iter();
    let mut script: Vec<OsString> = Vec::new();
    while let Some(argument) = rest.next() {
        let word = argument.to_string_lossy();
        let (name, inline) = match word.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (word.into_owned(), None),
        };
        let name = match name.as_str() {
            "-H" => "hostfile",
            "-i" => "include",
            "-e" => "exclude",
            "-q" => "quiet",
            _ => match name.strip_prefix("--") {
                Some(name) => name,
                None if name.starts_with('-') => bail!("deepspeed: the option {name} is unknown to memtrace"),
                None => {
                    script.push((*argument).clone());
                    script.extend(rest.by_ref().map(|argument| (*argument).clone()));
                    break;
                }
            },
        };
        if SWITCHES.contains(&name) {
            is_module |= name == "module";
            without_python |= name == "no_python";
            has_local_rank &= name != "no_local_rank";
            continue;
        }
        let next = || rest.next().map(|value| value.to_string_lossy().into_owned());
        let value = || inline.or_else(next).with_context(|| format!("deepspeed: --{name} needs a value"));
        match name {
            "num_nodes" => nodes = Some(number(name, &value()?)?),
            "num_gpus" | "num_accelerators" => cards = Some(number(name, &value()?)?),
            "hostfile" => hosts = Some(value()?),
            "include" | "exclude" => bail!(
                "deepspeed: --{name} names single cards; with --ranks give --num_nodes and --num_gpus instead"
            ),
            "elastic_training" | "min_elastic_nodes" | "max_elastic_nodes" => {
                bail!(
                    "deepspeed: --{name} lets the number of nodes change; with --ranks give --num_nodes instead"
                )
            }
            _ if IGNORED.contains(&name) => drop(value()?),
            _ => bail!("deepspeed: the option --{name} is unknown to memtrace"),
        }
    }
    if script.is_empty() {
        bail!("deepspeed: no script is named; for example: deepspeed --num_nodes 64 --num_gpus 8 train.py");
    }
    let listed = hosts.map(|path| of_hostfile(&path)).transpose()?;
    if has_local_rank {
        script.insert(1, "--local_rank=${local_rank}".into());
    }
    let per_node = match (cards, listed) {
        (Some(cards), Some((_, slots))) => PerNode::Number(cards.min(slots)),
        (Some(cards), None) => PerNode::Number(cards),
        (None, Some((_, slots))) => PerNode::Number(slots),
        (None, None) => PerNode::EachCard,
    };
    let listed = listed.map(|(hosts, _)| hosts);
    let nodes = match (nodes, listed) {
        (Some(nodes), Some(listed)) => nodes.min(listed),
        (nodes, listed) => nodes.or(listed).unwrap_or(1),
    };
    Ok(LaunchedRanks {
        launcher: LauncherKind::DeepSpeed,
        variables: Vec::new(),
        nodes,
        per_node,
        role: String::new(),
        rdzv_id: String::new(),
        max_restarts: String::new(),
        is_module,
        without_python,
        virtual_local_rank: false,
        script,
    })
}

fn number(name: &str, text: &str) -> Result<u32> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.with_context(|| format!("deepspeed: --{name} {text}: expected a number of at least 1"))
}

/// Returns the number of hosts in a file with lines `NAME slots=N`, and the number of cards of each host.
fn of_hostfile(path: &str) -> Result<(u32, u32)> {
    let text =
        fs::read_to_string(path).with_context(|| format!("deepspeed: cannot read --hostfile {path}"))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let (mut hosts, mut of_each) = (0_u32, None);
    for line in lines {
        let slots = line.split_whitespace().nth(1).and_then(|word| word.strip_prefix("slots="));
        let Some(slots) = slots.and_then(|slots| slots.parse().ok()).filter(|slots| *slots > 0) else {
            bail!("deepspeed: --hostfile {path}: {line:?} is not NAME slots=NUMBER");
        };
        if *of_each.get_or_insert(slots) != slots {
            bail!("deepspeed: --hostfile {path}: the hosts have different numbers of slots");
        }
        hosts += 1;
    }
    let slots = of_each.with_context(|| format!("deepspeed: --hostfile {path} names no host"))?;
    Ok((hosts, slots))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<LaunchedRanks> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        parse(&words.iter().collect::<Vec<_>>())
    }

    fn words(job: &LaunchedRanks) -> String {
        job.script.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn deepspeed_options_are_read_as_deepspeed_reads_them() {
        let job = parsed("--num_nodes 64 --num_gpus=8 --master_port 1 --quiet t.py --deepspeed --num_gpus 3")
            .unwrap();
        assert_eq!((job.nodes, job.per_node), (64, PerNode::Number(8)));
        assert_eq!(words(&job), "t.py --local_rank=${local_rank} --deepspeed --num_gpus 3");
        let job = parsed("--module --no_local_rank -q pkg.train -x").unwrap();
        assert_eq!((job.nodes, job.per_node, job.is_module), (1, PerNode::EachCard, true));
        assert_eq!(words(&job), "pkg.train -x");
        assert!(parsed("--no_python ./run.sh").unwrap().without_python);
        let file = std::env::temp_dir().join(format!("memtrace-hosts-{}", std::process::id()));
        let hosts = |text: &str, more: &str| {
            fs::write(&file, text).unwrap();
            parsed(&format!("--hostfile {} {more} t.py", file.display()))
        };
        let two = "# of the cluster\na slots=8\n\n b  slots=8 \n";
        let job = hosts(two, "").unwrap();
        assert_eq!((job.nodes, job.per_node), (2, PerNode::Number(8)));
        let job = hosts(two, "--num_nodes 1 --num_gpus 4").unwrap();
        assert_eq!((job.nodes, job.per_node), (1, PerNode::Number(4)));
        for (text, part) in [
            ("", "names no host"),
            ("a slots=8\nb slots=4\n", "different numbers of slots"),
            ("a\n", "is not NAME slots=NUMBER"),
            ("a slots=0\n", "is not NAME slots=NUMBER"),
        ] {
            let error = hosts(text, "").unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        fs::remove_file(&file).unwrap();
    }

    #[test]
    fn invalid_deepspeed_options_are_refused_with_the_reason() {
        for (line, part) in [
            ("", "no script is named"),
            ("--num_gpus 8", "no script is named"),
            ("--num_gpus", "--num_gpus needs a value"),
            ("--num_gpus 0 t.py", "expected a number of at least 1"),
            ("--num_nodes many t.py", "expected a number of at least 1"),
            ("--include a:0 t.py", "names single cards"),
            ("-e a:0 t.py", "names single cards"),
            ("--autotuning run t.py", "--autotuning is unknown"),
            ("--elastic_training --max_elastic_nodes 4 t.py", "give --num_nodes instead"),
            ("-x t.py", "-x is unknown"),
            ("--hostfile /no/such t.py", "cannot read --hostfile"),
        ] {
            let error = parsed(line).unwrap_err().to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }
}
