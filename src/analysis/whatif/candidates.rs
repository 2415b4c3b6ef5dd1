//! The changes that `memtrace advise` tries, what each costs, and the lines of code that make it.

use std::collections::{BTreeMap, BTreeSet};

use super::calls::MOST_LEVELS;
use super::changes::{Change, NewOptimizer};

/// The parts of the tokens that the loss is advised to take.
const PARTS: i64 = 8;
/// The most groups of modules that are checkpointed.
const MOST_GROUPS: usize = 4;

/// The groups of modules that differ in one number of their path, as patterns: `GPT.h.*`. `paths` are those of the modules that
/// are called. Where the numbered ones are not (a list in a list), the pattern goes on to the first that is: `GPT.h.*.*`. A module
/// below another of a group is in none of its own. Those with the most modules come first.
#[must_use]
pub(super) fn module_groups<'a>(paths: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let called: BTreeSet<&str> = paths.into_iter().collect();
    let mut groups: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for path in &called {
        // The outermost number decides.
        let mut start = 0;
        let mut parts = path.split('.').map(|part| {
            let from = start;
            start += part.len() + 1;
            (from, part)
        });
        let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
        let Some((from, number)) = parts.find(|(_, part)| is_number(part)) else { continue };
        let ends = [from + number.len()].into_iter().chain(parts.map(|(from, part)| from + part.len()));
        let mut ends = ends.take(MOST_LEVELS).enumerate();
        if let Some((below, end)) = ends.find(|(_, end)| called.contains(&path[..*end])) {
            groups
                .entry(format!("{}{}", plain(&path[..from]), ["*"; MOST_LEVELS][..=below].join(".")))
                .or_default()
                .insert(&path[..end]);
        }
    }
    let mut groups: Vec<(String, usize)> = groups
        .into_iter()
        .map(|(pattern, modules)| (pattern, modules.len()))
        .filter(|(_, count)| *count > 1)
        .collect();
    groups.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    groups.into_iter().map(|(pattern, _)| pattern).collect()
}

/// The path with `*` for each character that means something else in a pattern, a list of patterns, or Python's `fnmatch`.
fn plain(path: &str) -> String {
    let is_plain = |char: char| char.is_alphanumeric() || "._-".contains(char);
    path.chars().map(|char| if is_plain(char) { char } else { '*' }).collect()
}

/// The changes to try for a program with these groups of modules.
#[must_use]
pub(super) fn candidates(groups: &[String]) -> Vec<Change> {
    let mut all = Vec::new();
    if !groups.is_empty() {
        all.push(Change::Checkpoint(groups[..groups.len().min(MOST_GROUPS)].join(",")));
    }
    all.extend([
        Change::ChunkLoss(PARTS),
        Change::Optimizer(NewOptimizer::EightBit),
        Change::Optimizer(NewOptimizer::Adafactor),
        Change::StepInBackward,
        Change::OffloadOptimizer,
        Change::Bfloat16,
        Change::Batch(1, 2),
    ]);
    all
}

/// Returns true if a program can have all of these changes.
pub(super) fn fit_together(changes: &[&Change]) -> bool {
    let optimizers = changes.iter().filter(|change| matches!(change, Change::Optimizer(_))).count();
    let in_backward = changes.contains(&&Change::StepInBackward);
    let offloads = changes.contains(&&Change::OffloadOptimizer);
    optimizers <= 1 && !(offloads && (in_backward || optimizers > 0))
}

/// The sets of at most `most` changes that a program can have together, as indices of `changes`: the smallest first, and the
/// earlier changes before the later ones.
#[must_use]
pub fn sets(changes: &[Change], most: usize) -> Vec<Vec<usize>> {
    let mut all: Vec<Vec<usize>> = Vec::new();
    let mut last: Vec<Vec<usize>> = vec![Vec::new()];
    for _ in 0..most {
        let longer = |set: &Vec<usize>| {
            let first = set.last().map_or(0, |index| index + 1);
            (first..changes.len()).map(|index| [&set[..], &[index]].concat()).collect::<Vec<_>>()
        };
        last = last.iter().flat_map(longer).collect();
        last.retain(|set| fit_together(&set.iter().map(|index| &changes[*index]).collect::<Vec<_>>()));
        all.extend(last.iter().cloned());
    }
    all
}

/// The cost of a change and the lines of code that make it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// What the change costs.
    pub costs: String,
    /// The lines of Python.
    pub code: Vec<String>,
}

/// The cost of a change and its code. `again` has the ops that the forward of checkpointed modules runs again in a step, and all
/// ops of that step.
#[must_use]
pub fn advice(change: &Change, again: (u64, u64)) -> Advice {
    let of = |costs: &str, code: &[&str]| Advice {
        costs: costs.to_owned(),
        code: code.iter().map(|line| (*line).to_owned()).collect(),
    };
    match change {
        Change::Checkpoint(patterns) => {
            let (ops, all) = again;
            let share = (100 * ops).checked_div(all).unwrap_or(0);
            let mut code = vec![
                "import fnmatch, torch.utils.checkpoint as checkpoints".to_owned(),
                "for name, module in model.named_modules():".to_owned(),
                "    path = type(model).__name__ + \".\" + name".to_owned(),
                format!("    for pattern in {:?}:", patterns.split(',').collect::<Vec<_>>()),
                "        if path.count(\".\") == pattern.count(\".\") and fnmatch.fnmatchcase(path, pattern):".to_owned(),
            ];
            code.push(
                "            module.forward = (lambda f: lambda *a, **k: checkpoints.checkpoint(f, *a, use_reentrant=False, **k))(module.forward)"
                    .to_owned(),
            );
            Advice {
                costs: format!(
                    "a second forward of these modules: {ops} of {all} op calls of a step again ({share} %)"
                ),
                code,
            }
        }
        Change::ChunkLoss(parts) => Advice {
            costs: "the head and the loss run twice".to_owned(),
            code: vec![
                "# x: the input of the head, flattened to (tokens, width); target: (tokens,)".to_owned(),
                "part = lambda x, t: F.cross_entropy(model.head(x), t, reduction=\"sum\")".to_owned(),
                format!(
                    "losses = [torch.utils.checkpoint.checkpoint(part, *p, use_reentrant=False) for p in zip(x.chunk({parts}), target.chunk({parts}))]"
                ),
                "loss = sum(losses) / len(x)".to_owned(),
            ],
        },
        Change::Optimizer(NewOptimizer::EightBit) => of(
            "state of 8 bits, in blocks of 256 with a scale each",
            &["import bitsandbytes", "optimizer = bitsandbytes.optim.AdamW8bit(model.parameters(), lr=lr)"],
        ),
        Change::Optimizer(NewOptimizer::Adafactor) => of(
            "another optimizer, with its own learning rate; it steps one parameter at a time",
            &["optimizer = torch.optim.Adafactor(model.parameters(), lr=lr)"],
        ),
        Change::Optimizer(NewOptimizer::Sgd) => of(
            "another optimizer, without momentum",
            &["optimizer = torch.optim.SGD(model.parameters(), lr=lr)"],
        ),
        Change::StepInBackward => of(
            "no gradient accumulation and no clipping by the norm of all gradients",
            &[
                "optimizers = {p: torch.optim.AdamW([p], lr=lr) for p in model.parameters()}",
                "def step(p): optimizers[p].step(); optimizers[p].zero_grad()",
                "for p in model.parameters(): p.register_post_accumulate_grad_hook(step)",
                "# and no optimizer.step() after loss.backward()",
            ],
        ),
        Change::OffloadOptimizer => of(
            "gradients and parameters cross to the host and back in each step, and the host computes it",
            &[
                "from torchao.optim import CPUOffloadOptimizer",
                "optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=lr)",
            ],
        ),
        Change::Bfloat16 => of(
            "less precision, in the parameters and the optimizer's state too",
            &["model = model.bfloat16()  # and the inputs of floats: x = x.bfloat16()"],
        ),
        Change::Batch(times, parts) => Advice {
            costs: format!(
                "{parts} passes for each {times} of now; with gradient accumulation the same result"
            ),
            code: vec![format!("batch_size = batch_size * {times} // {parts}")],
        },
        Change::Without(_) | Change::Shard { .. } | Change::ShardOptimizer(_) => of("", &[]),
    }
}

#[cfg(test)]
mod tests {
    use super::super::changes::takes_module;
    use super::*;

    #[test]
    fn advise_groups_modules_by_the_outermost_number() {
        let paths = [
            "GPT",
            "GPT.h.0",
            "GPT.h.1",
            "GPT.h.1.mlp.0",
            "GPT.h.1.mlp.1",
            "GPT.out.0",
            "E.x.0",
            "E.x.1",
            "E.x.2",
        ];
        assert_eq!(module_groups(paths), ["E.x.*", "GPT.h.*"]);
        assert!(module_groups(["Net", "Net.fc"]).is_empty());
    }

    #[test]
    fn advise_groups_the_modules_that_are_called() {
        // A list in a list: neither GPT.h nor GPT.h.0 has a forward.
        let paths =
            ["GPT", "GPT.h.0.0", "GPT.h.0.0.fc", "GPT.h.0.1", "GPT.h.1.0", "GPT.h.1.1", "GPT.x.0", "GPT.x.1"];
        assert_eq!(module_groups(paths), ["GPT.h.*.*", "GPT.x.*"]);
        for path in ["a,b .h", "Net.it's", "N*[x]", " Net"] {
            let paths: Vec<String> = (0..2).map(|number| format!("{path}.{number}")).collect();
            let groups = module_groups(paths.iter().map(String::as_str));
            let [pattern] = &groups[..] else { panic!("{path}: {groups:?}") };
            assert!(takes_module(pattern, &paths[1]), "{path}: {pattern}");
        }
    }

    #[test]
    fn advise_tries_small_sets_first_and_no_two_optimizers() {
        let changes = candidates(&["GPT.h.*".to_owned()]);
        let sets = sets(&changes, 3);
        assert_eq!(sets[0], [0]);
        assert!(sets.windows(2).all(|two| two[0].len() <= two[1].len()));
        let both = |set: &Vec<usize>| {
            set.iter().filter(|index| matches!(changes[**index], Change::Optimizer(_))).count()
        };
        assert!(sets.iter().all(|set| both(set) <= 1));
        let offload = changes.iter().position(|change| *change == Change::OffloadOptimizer).unwrap();
        let eight =
            changes.iter().position(|change| *change == Change::Optimizer(NewOptimizer::EightBit)).unwrap();
        assert!(!sets.contains(&vec![eight, offload]));
    }
}
