//! The shape of a distributed job, and the command line and the environment of each of its ranks.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, bail};
use memtrace_cards::Spec;
use memtrace_trace::counts::counted;

use crate::cluster::launched_ranks::LaunchedRanks;
use crate::cluster::launcher::{Launcher, LauncherKind, launcher};
use crate::cluster::{accelerate, deepspeed, ranks, torchrun};
use crate::search_path::find_program;

/// The default number of cards in a node, as in common servers with NVLink.
const CARDS_OF_A_NODE: u32 = 8;
/// The maximum number of ranks of a job.
const MOST_RANKS: u32 = 1 << 20;

/// A distributed job, and which of its ranks run.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) nodes: u32,
    pub(crate) per_node: u32,
    /// The ranks that run. With [`by_stage`](Self::by_stage), only the first rank.
    pub(crate) ranks: BTreeSet<u32>,
    /// True if one rank of each further stage of the first rank's pipeline runs after the first rank.
    pub(crate) by_stage: bool,
    /// The request for the cards of one node, such as `8xh100-80g`.
    pub(crate) card: String,
    /// The command line of each rank, in which `${local_rank}` is still to be replaced.
    command: Vec<OsString>,
    /// `None` if a launcher does not start the ranks.
    launched: Option<LaunchedRanks>,
}

impl Job {
    /// Determines the job from `--phantom`, `--ranks`, the command line and the environment, which `variable`
    /// looks up.
    ///
    /// # Errors
    /// When the launcher is unknown, the numbers contradict each other, or `--ranks` is invalid.
    pub(crate) fn new(
        card: &str,
        ranks: &str,
        command: &[&OsString],
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Job> {
        let card_of_user = card;
        let (count, card) = Spec::split_count(card);
        if count == Some(0) {
            bail!("--phantom asks for 0 cards; a job needs a card for each rank, such as 512xh100-80g");
        }
        let quoted = |what: &str| format!("--phantom {}: {what}", card_of_user);
        if card.split(',').any(|part| part.starts_with("count=")) {
            bail!(quoted(
                "with --ranks, write the number of cards before the preset (16xh100-80g) or set WORLD_SIZE; \
                 leave out count="
            ));
        }
        let digits = card.find(|c: char| !c.is_ascii_digit()).unwrap_or(0);
        if (digits > 0 && card[digits..].starts_with('x')) || count.is_some_and(|count| count > MOST_RANKS) {
            bail!(quoted(&format!("a job has at most {MOST_RANKS} ranks")));
        }
        let launched = match launcher(command) {
            Launcher::Known { kind, arguments, python } => {
                let python: Vec<OsString> = match python {
                    Some(words) => words.iter().map(|word| (*word).clone()).collect(),
                    None => interpreter(command[0])?,
                };
                let launched = match kind {
                    LauncherKind::Torchrun => torchrun::parse(arguments, &variable)?,
                    LauncherKind::Accelerate => {
                        accelerate::ask(&python, arguments, count.unwrap_or(1).min(CARDS_OF_A_NODE))?
                    }
                    LauncherKind::DeepSpeed => deepspeed::parse(arguments)?,
                };
                Some((launched, python))
            }
            Launcher::Unknown(name) => {
                bail!("--ranks: the options of `{name}` are not understood; {}", way_of(&name))
            }
            Launcher::Wrapped(program, launcher) => bail!(
                "--ranks: `{program}` runs {launcher}, which would start ranks of its own; give the command of {launcher} \
                 itself: memtrace run --phantom 512xh100-80g --ranks 0 -- {}",
                match launcher {
                    "accelerate" => "accelerate launch train.py".to_owned(),
                    _ => format!("{launcher} train.py"),
                }
            ),
            Launcher::None => None,
        };
        let (nodes, per_node) = match &launched {
            Some((launched, _)) => launched.nodes_and_ranks_per_node(count)?,
            None => of_environment(count, &variable)?,
        };
        let world = nodes.checked_mul(per_node).filter(|world| *world <= MOST_RANKS);
        let Some(world) = world else {
            bail!("--ranks: {nodes} nodes of {per_node} ranks are more than {MOST_RANKS} ranks")
        };
        let by_stage = ranks.trim() == ranks::ONE_PER_STAGE;
        let ranks = if by_stage { BTreeSet::from([0]) } else { ranks::parse(ranks, world)? };
        if by_stage && world == 1 {
            bail!("--ranks {}: the job has one rank", ranks::ONE_PER_STAGE);
        }
        let command_of_rank = match &launched {
            Some((launched, python)) => launched.command(python),
            None => command.iter().map(|word| (*word).clone()).collect(),
        };
        Ok(Job {
            nodes,
            per_node,
            ranks,
            by_stage,
            card: format!("{per_node}x{card}"),
            command: command_of_rank,
            launched: launched.map(|(launched, _)| launched),
        })
    }

    /// Returns the number of ranks of the whole job.
    pub(crate) fn world(&self) -> u32 {
        self.nodes * self.per_node
    }

    /// Returns true if some ranks do not run.
    pub(crate) fn has_stand_ins(&self) -> bool {
        (self.ranks.len() as u64) < u64::from(self.world())
    }

    /// Returns the text that `memtrace run` prints about the job: the ranks that run, the number of
    /// stand-ins, the nodes, and the launcher that it replaces.
    pub(crate) fn summary(&self) -> String {
        let (nodes, cards) = (counted(u64::from(self.nodes), "node"), counted(self.per_node.into(), "rank"));
        let rank = if self.ranks.len() == 1 { "rank" } else { "ranks" };
        let mut text = format!("{rank} {} of {} ", ranks::shown(&self.ranks), self.world());
        text.push_str(if self.ranks.len() == 1 { "runs" } else { "run" });
        if self.has_stand_ins() {
            let absent = u64::from(self.world()) - self.ranks.len() as u64;
            text.push_str(&format!(", {} for the others", counted(absent, "stand-in")));
        }
        if self.by_stage {
            text.push_str("; then one rank of each further pipeline stage");
        }
        text.push_str(&format!(" ({nodes} of {cards}"));
        if let Some(launched) = &self.launched {
            text.push_str(&format!("; started directly instead of by {}", launched.launcher.words().0));
        }
        text.push(')');
        text
    }

    /// Returns the ranks that run and the number of all ranks, such as `0,7/512`. This is the value of
    /// [`RANKS_VARIABLE`](memtrace_machine::RANKS_VARIABLE) for a rank.
    pub(crate) fn ranks_of_world(&self, rank: u32) -> String {
        // The ranks of the other stages are not known until the first rank reports its pipeline.
        let ranks = if self.by_stage { rank.to_string() } else { ranks::shown(&self.ranks) };
        format!("{ranks}/{}", self.world())
    }

    /// Returns the command line of a rank. As in torchrun, `${local_rank}` in an argument is replaced.
    pub(crate) fn command(&self, rank: u32) -> Vec<OsString> {
        let local = (rank % self.per_node).to_string();
        let replaced = |word: &OsString| match word.to_str() {
            Some(text) if self.launched.is_some() => text.replace("${local_rank}", &local).into(),
            _ => word.clone(),
        };
        self.command.iter().map(replaced).collect()
    }

    /// Returns the environment that a launcher gives to a rank. `port` is the port of the rendezvous store.
    pub(crate) fn environment(&self, rank: u32, port: u16) -> Vec<(&str, String)> {
        let (node, local) = (rank / self.per_node, rank % self.per_node);
        let mut all = vec![
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", self.world().to_string()),
            ("LOCAL_RANK", local.to_string()),
            ("LOCAL_WORLD_SIZE", self.per_node.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.to_string()),
        ];
        let Some(launched) = &self.launched else { return all };
        if launched.launcher == LauncherKind::DeepSpeed {
            let cards: Vec<String> = (0..self.per_node).map(|card| card.to_string()).collect();
            all.extend([
                ("CROSS_RANK", node.to_string()),
                ("CROSS_SIZE", self.nodes.to_string()),
                ("LOCAL_SIZE", self.per_node.to_string()),
                ("CUDA_VISIBLE_DEVICES", cards.join(",")),
            ]);
            return all;
        }
        all.extend([
            ("GROUP_RANK", node.to_string()),
            ("GROUP_WORLD_SIZE", self.nodes.to_string()),
            ("ROLE_RANK", rank.to_string()),
            ("ROLE_NAME", launched.role.clone()),
            ("ROLE_WORLD_SIZE", self.world().to_string()),
            ("TORCHELASTIC_RESTART_COUNT", "0".to_owned()),
            ("TORCHELASTIC_MAX_RESTARTS", launched.max_restarts.clone()),
            ("TORCHELASTIC_RUN_ID", launched.rdzv_id.clone()),
            // Without stand-ins, rank 0 serves the store in which the ranks meet. With stand-ins, this
            // command serves it.
            ("TORCHELASTIC_USE_AGENT_STORE", if self.has_stand_ins() { "True" } else { "False" }.to_owned()),
        ]);
        // Prefer the variables of a launcher that calls torchrun, such as `accelerate launch`: it sets them
        // before torchrun does.
        let mine = |name: &str| launched.variables.iter().find(|(mine, _)| mine == name);
        let or_default = |name: &'static str, value: &str| {
            let set = mine(name).map(|(_, value)| value.clone()).or_else(|| std::env::var(name).ok());
            (name, set.unwrap_or_else(|| value.to_owned()))
        };
        all.extend(launched.variables.iter().map(|(name, value)| (name.as_str(), value.clone())));
        all.push(or_default("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"));
        if self.per_node > 1 {
            all.push(or_default("OMP_NUM_THREADS", "1"));
        }
        if launched.virtual_local_rank {
            all.push(("CUDA_VISIBLE_DEVICES", local.to_string()));
            all.retain(|(name, _)| *name != "LOCAL_RANK");
            all.push(("LOCAL_RANK", "0".to_owned()));
        }
        all
    }
}

/// Returns the number of nodes and the number of ranks per node of a job without a launcher, whose ranks read their
/// number from the environment. `variable` looks up `WORLD_SIZE` and `LOCAL_WORLD_SIZE`.
fn of_environment(count: Option<u32>, variable: impl Fn(&str) -> Option<String>) -> Result<(u32, u32)> {
    let number = |name: &str| -> Result<Option<u32>> {
        let Some(text) = variable(name) else { return Ok(None) };
        let number = text.trim().parse().ok().filter(|number| *number > 0);
        number.map(Some).with_context(|| format!("{name}={text}: expected a number of ranks"))
    };
    let world = match (number("WORLD_SIZE")?, count) {
        (Some(world), Some(count)) if world != count => {
            bail!("WORLD_SIZE is {world} and --phantom asks for {}", counted(count.into(), "card"))
        }
        (Some(world), _) | (None, Some(world)) => world,
        (None, None) => bail!(
            "--ranks: the number of ranks is not known; name it before the card, as in --phantom 512xh100-80g, \
             or set WORLD_SIZE"
        ),
    };
    let per_node = number("LOCAL_WORLD_SIZE")?.unwrap_or_else(|| world.min(CARDS_OF_A_NODE));
    if world % per_node != 0 {
        bail!(
            "{world} ranks do not fill whole nodes of {per_node}; set LOCAL_WORLD_SIZE to the number of \
               ranks per node"
        );
    }
    Ok((world / per_node, per_node))
}

/// Returns advice on how to start the ranks of a job whose launcher this command does not know.
fn way_of(launcher: &str) -> &'static str {
    if launcher.contains("accelerate") {
        "start its ranks with: memtrace run --phantom 512xh100-80g --ranks 0 -- accelerate launch \
         --num_machines 64 --num_processes 512 train.py"
    } else {
        "give the command of torchrun itself, or of one rank: memtrace run --phantom 512xh100-80g --ranks 0 -- python \
         train.py"
    }
}

/// Returns the interpreter of the script `torchrun` and its options, from the script's first line.
fn interpreter(torchrun: &OsStr) -> Result<Vec<OsString>> {
    let shown = Path::new(torchrun).display();
    let Some(path) = find_program(torchrun) else {
        bail!(
            "{shown} is not in PATH; activate the environment of torch, or start it as a module, as in \
             python -m torch.distributed.run"
        )
    };
    let mut line = String::new();
    let file = fs::File::open(&path).with_context(|| format!("cannot read {}", path.display()))?;
    BufReader::new(file.take(4096)).read_line(&mut line).ok();
    let words: Vec<&str> = line.strip_prefix("#!").unwrap_or_default().split_whitespace().collect();
    let is_env = words.first().is_some_and(|first| first.ends_with("/env"));
    let python = words.iter().skip_while(|word| is_env && (word.ends_with("/env") || **word == "-S"));
    let python: Vec<OsString> = python.map(OsString::from).collect();
    let is_python = python.first().is_some_and(|word| word.to_string_lossy().contains("python"));
    if !is_python {
        bail!(
            "{} is not a Python script, so its interpreter is unknown; start it as a module, as in python \
             -m torch.distributed.run",
            path.display()
        )
    };
    Ok(python)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(card: &str, ranks: &str, line: &str, variables: &[(&str, &str)]) -> Result<Job> {
        let words: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
        let variable =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        Job::new(card, ranks, &words.iter().collect::<Vec<_>>(), variable)
    }

    const RUN: &str = "python -m torch.distributed.run";

    #[test]
    fn a_rank_has_the_environment_that_torchrun_gives_it() {
        let line = format!("{RUN} --nnodes 64 --nproc-per-node 8 train.py --id ${{local_rank}}");
        let job = job("512xh100-80g,mem=40g", "0,511", &line, &[]).unwrap();
        assert_eq!(job.card, "8xh100-80g,mem=40g");
        assert_eq!(job.command(511), ["python", "-u", "train.py", "--id", "7"]);
        let environment = job.environment(511, 1234);
        let value = |name: &str| environment.iter().find(|(key, _)| *key == name).unwrap().1.clone();
        let names = ["RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "MASTER_PORT"];
        assert_eq!(names.map(value), ["511", "7", "63", "8", "512", "1234"]);
        assert_eq!(job.ranks_of_world(511), "0,511/512");
        assert!(
            job.summary().contains("ranks 0,511 of 512 run, 510 stand-ins for the others (64 nodes of 8")
        );
    }

    #[test]
    fn a_rank_has_the_environment_and_the_argument_that_deepspeed_gives_it() {
        let line = "python -m deepspeed.launcher.runner --num_nodes 64 --num_gpus 8 train.py --deepspeed";
        let job = job("512xh100-80g", "511", line, &[]).unwrap();
        assert_eq!(job.command(511), ["python", "-u", "train.py", "--local_rank=7", "--deepspeed"]);
        let environment = job.environment(511, 1234);
        let value =
            |name: &str| environment.iter().find(|(key, _)| *key == name).map(|(_, value)| value.as_str());
        let names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE", "LOCAL_SIZE"];
        assert_eq!(names.map(value), ["511", "7", "512", "63", "64", "8"].map(Some));
        assert_eq!(value("CUDA_VISIBLE_DEVICES"), Some("0,1,2,3,4,5,6,7"));
        assert_eq!(value("TORCHELASTIC_RUN_ID"), None);
        assert!(job.summary().ends_with("(64 nodes of 8 ranks; started directly instead of by deepspeed)"));
    }

    #[test]
    fn a_job_without_a_launcher_has_the_ranks_of_its_environment() {
        let of = |card: &str, variables: &[(&str, &str)]| {
            let job = job(card, "0", "python train.py", variables).unwrap();
            (job.world(), job.per_node, job.card)
        };
        assert_eq!(of("512xh100-80g", &[]), (512, 8, "8xh100-80g".to_owned()));
        assert_eq!(of("h100-80g", &[("WORLD_SIZE", "4")]), (4, 4, "4xh100-80g".to_owned()));
        let sixteen = &[("WORLD_SIZE", "16"), ("LOCAL_WORLD_SIZE", "4")];
        assert_eq!(of("16xrtx4090", sixteen), (16, 4, "4xrtx4090".to_owned()));
    }

    #[test]
    fn numbers_that_do_not_fit_are_refused_with_the_reason() {
        let eight = format!("{RUN} --nproc-per-node 8 train.py");
        let deepspeed = "python -m deepspeed.launcher.runner --num_gpus 8 train.py".to_owned();
        let cards = format!("{RUN} --nnodes 3 --nproc-per-node gpu train.py");
        for (card, ranks, line, variables, part) in [
            ("512xh100-80g", "0", eight.as_str(), &[][..], "512 cards and torchrun for 8 ranks (1 x 8)"),
            ("8xh100-80g", "8", eight.as_str(), &[], "no rank 8; the job has 8 ranks"),
            ("8xh100-80g", "", eight.as_str(), &[], "--ranks is empty"),
            ("8xh100-80g", "0", cards.as_str(), &[], "cannot be divided evenly among 3 nodes"),
            ("h100-80g", "0", "python train.py", &[], "the number of ranks is not known"),
            ("12xh100-80g", "0", "python train.py", &[], "do not fill whole nodes of 8"),
            ("0xh100-80g", "0", "python train.py", &[], "asks for 0 cards"),
            ("8xh100-80g,count=2", "7", "python train.py", &[], "leave out count="),
            ("99999999999999999999xh100-80g", "0", "python train.py", &[], "at most 1048576 ranks"),
            ("99999999xh100-80g", "0", "python train.py", &[], "at most 1048576 ranks"),
            ("8xh100-80g", "0", "env A=1 torchrun x.py", &[], "`env` runs torchrun, which would start ranks"),
            ("8xh100-80g", "0", "env mpirun -n 8 python x.py", &[], "options of `mpirun` are not understood"),
            ("0xh100-80g", "0", cards.as_str(), &[], "asks for 0 cards"),
            ("4xh100-80g", "0", "python train.py", &[("WORLD_SIZE", "8")], "WORLD_SIZE is 8 and"),
            ("4xh100-80g", "0", "python train.py", &[("WORLD_SIZE", "x")], "WORLD_SIZE=x: expected"),
            (
                "4xh100-80g",
                "0",
                "accelerate config",
                &[],
                "start its ranks with: memtrace run --phantom 512xh100-80g --ranks 0 -- accelerate launch",
            ),
            (
                "512xh100-80g",
                "0",
                deepspeed.as_str(),
                &[],
                "deepspeed for 8 ranks (1 x 8): make it 8x, or change --num_nodes",
            ),
            ("4xh100-80g", "0", "/no/such/torchrun t.py", &[], "cannot read /no/such/torchrun"),
        ] {
            let error = job(card, ranks, line, variables).unwrap_err().to_string();
            assert!(error.contains(part), "{card} {line}: {error}");
        }
    }
}
