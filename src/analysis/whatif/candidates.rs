//! The changes that `memtrace advise` tries, the cost of each, and the lines of code that make it.

use std::collections::{BTreeMap, BTreeSet};

use super::calls::MOST_LEVELS;
use super::changes::{Change, NewOptimizer, conflict};
use super::predict::OpsAgain;
use crate::state::module_layers::is_number;

/// The number of parts into which the suggested loss splits its tokens (`--chunk-loss`).
const PARTS: i64 = 8;
/// The maximum number of groups of modules for which checkpoints are suggested.
const MOST_GROUPS: usize = 4;

/// Returns the groups of modules whose paths differ in one number, as patterns such as `GPT.h.*`, the group
/// with the most modules first. `paths` are the paths of the called modules.
///
/// If the numbered modules are not called themselves (a list in a list), the pattern continues to the first
/// level that is called: `GPT.h.*.*`. Modules below a module of a group form no group of their own.
#[must_use]
pub(super) fn module_groups<'a>(paths: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let called: BTreeSet<&str> = paths.into_iter().collect();
    let mut groups: BTreeMap<String, BTreeSet<&str>> = BTreeMap::new();
    for path in &called {
        // The outermost number in a path determines its group.
        let mut start = 0;
        let mut parts = path.split('.').map(|part| {
            let from = start;
            start += part.len() + 1;
            (from, part)
        });
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

/// Replaces each character of a path that has a special meaning in a pattern or in a list of patterns by `*`.
fn plain(path: &str) -> String {
    let is_plain = |char: char| char.is_alphanumeric() || "._-".contains(char);
    path.chars().map(|char| if is_plain(char) { char } else { '*' }).collect()
}

/// Returns the changes to try for a program with these groups of modules, each as one change alone.
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
        Change::Autocast,
        Change::Bfloat16,
        Change::Batch(1, 2),
    ]);
    all
}

/// Returns the sets of at most `most` changes that a program can combine, as indices of `changes`. Smaller
/// sets come first, and earlier changes come before later ones.
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
        last.retain(|set| conflict(&set.iter().map(|index| &changes[*index]).collect::<Vec<_>>()).is_none());
        all.extend(last.iter().cloned());
    }
    all
}

/// The cost of a change and the lines of code that make it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advice {
    /// A description of the cost.
    pub costs: String,
    /// The lines of Python that make the change.
    pub code: Vec<String>,
}

/// Returns the cost of a change and its code. `again` has the number of ops that checkpointed modules run
/// again.
#[must_use]
pub fn advice(change: &Change, again: &OpsAgain) -> Advice {
    let of = |costs: &str, code: &[&str]| Advice {
        costs: costs.to_owned(),
        code: code.iter().map(|line| (*line).to_owned()).collect(),
    };
    match change {
        Change::Checkpoint(patterns) => {
            Advice { costs: checkpoint_costs(again), code: checkpoint_code(patterns) }
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
        Change::Autocast => of(
            "products, convolutions and attention in 16 bits; parameters and the optimizer stay float32",
            &[
                "with torch.autocast(\"cuda\", dtype=torch.bfloat16):  # around the forward and the loss, not the backward",
                "    loss = model(x, target)",
                "loss.backward()",
            ],
        ),
        Change::Bfloat16 => of(
            "less precision, in the parameters and the optimizer's state too",
            &["model = model.bfloat16()  # and the inputs of floats: x = x.bfloat16()"],
        ),
        Change::Batch(times, parts) => Advice {
            costs: format!(
                "{parts} forward and backward passes instead of {times}; gradient accumulation gives the same \
                 result, except with a batch norm or a loss over pairs of samples (contrastive){}",
                if times < parts { format!("; needs a batch of {parts} or more") } else { String::new() }
            ),
            code: batch_code(*times, *parts),
        },
        Change::Without(_) | Change::Shard { .. } | Change::ShardOptimizer(_) => of("", &[]),
    }
}

/// Returns the lines of code that split the batch into parts and accumulate the gradients of the parts.
fn batch_code(times: i64, parts: i64) -> Vec<String> {
    if times != 1 {
        return vec![format!("batch_size = batch_size * {times} // {parts}")];
    }
    vec![
        format!("batch_size //= {parts}"),
        "# to train with the gradient of the whole batch (not for a contrastive loss), in the training loop:"
            .to_owned(),
        format!("(loss / {parts}).backward()"),
        format!("if (step + 1) % {parts} == 0:"),
        "    optimizer.step()".to_owned(),
        "    optimizer.zero_grad()".to_owned(),
    ]
}

/// Describes the cost of the second forward: its op calls, also as a share of the op calls of a step's
/// forward and backward.
fn checkpoint_costs(again: &OpsAgain) -> String {
    let OpsAgain { ops, of, .. } = again;
    let mut costs = "a second forward of these modules".to_owned();
    if again.has_backward {
        let share = (100 * ops).checked_div(*of).unwrap_or(0);
        costs.push_str(&format!(
            ": {ops} more op calls to the {of} of a step's forward and backward ({share} %)"
        ));
    } else if *ops > 0 {
        costs.push_str(&format!(
            ": {ops} op calls; their share is unknown, because the trace has no complete backward"
        ));
    }
    if again.has_batch_norm {
        costs.push_str("; batch norms in them update their running statistics twice a step");
    }
    costs
}

/// Returns the lines that checkpoint the modules of these patterns.
fn checkpoint_code(patterns: &str) -> Vec<String> {
    let mut code = vec![
        "from functools import partial".to_owned(),
        "from torch.utils.checkpoint import checkpoint".to_owned(),
    ];
    for pattern in patterns.split(',') {
        code.extend(loop_over(pattern.trim()));
    }
    code
}

/// Returns the lines that checkpoint the modules of a pattern: one line for the model itself, one or two nested
/// loops or, for any other pattern, a search by name.
fn loop_over(pattern: &str) -> Vec<String> {
    let set = |module: &str| {
        format!("{module}.forward = partial(checkpoint, {module}.forward, use_reentrant=False)")
    };
    let (root, below) = pattern.split_once('.').unwrap_or((pattern, ""));
    let is_of_root = !root.contains("**");
    if is_of_root && below.is_empty() {
        return vec![set("model")];
    }
    let (mut container, mut loops, mut is_plain) = ("model".to_owned(), Vec::new(), is_of_root);
    for level in below.split('.') {
        is_plain &= level == "*" || is_name(level);
        if level == "*" {
            let item = if loops.is_empty() { "block" } else { "inner" };
            loops.push(format!("for {item} in {container}.children():"));
            item.clone_into(&mut container);
        } else {
            container.push_str(&format!(".{level}"));
        }
    }
    // Write loops only if every level is `*` or a Python name, the last level is `*`, and at most two levels
    // are `*`. Any other pattern needs a search by name.
    let is_known = is_plain && pattern.ends_with('*') && (1..=2).contains(&loops.len());
    if !is_known {
        // The names of modules have no level for the model. A `**` in the first level also matches levels below it.
        let (below, name) = match pattern.find("**") {
            Some(at) if !is_of_root => (&pattern[at..], "\".\" + name"),
            _ => (below, "name"),
        };
        return vec![
            "import re".to_owned(),
            "for name, block in model.named_modules():".to_owned(),
            format!("    if re.fullmatch(r\"{}\", {name}):", regular_expression(below)),
            format!("        {}", set("block")),
        ];
    }
    let mut lines: Vec<String> =
        loops.iter().enumerate().map(|(depth, line)| format!("{}{line}", "    ".repeat(depth))).collect();
    lines.push(format!("{}{}", "    ".repeat(loops.len()), set(&container)));
    lines
}

/// Returns a pattern of module paths as a regular expression of Python, for a raw string in double quotes.
fn regular_expression(pattern: &str) -> String {
    let mut regex = String::new();
    let mut chars = pattern.chars().peekable();
    while let Some(char) = chars.next() {
        match char {
            '*' if chars.next_if_eq(&'*').is_some() => regex.push_str(".*"),
            '*' => regex.push_str("[^.]*"),
            '?' => regex.push('.'),
            char if char.is_alphanumeric() || char == '_' => regex.push(char),
            '"' | '\0'..=' ' => regex.push_str(&format!("\\x{:02x}", u32::from(char))),
            char => regex.extend(['\\', char]),
        }
    }
    regex
}

/// Returns true for a name that can follow a dot in Python, as an attribute.
fn is_name(level: &str) -> bool {
    !level.starts_with(|first: char| first.is_ascii_digit())
        && !level.is_empty()
        && level.chars().all(|char| char.is_alphanumeric() || char == '_')
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
    fn advise_writes_the_loop_that_a_person_would_write() {
        let code = checkpoint_code("GPT.h.*");
        assert_eq!(
            code[2..],
            [
                "for block in model.h.children():",
                "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)"
            ]
        );
        assert_eq!(
            loop_over("Net.x.*.y.*"),
            [
                "for block in model.x.children():",
                "    for inner in block.y.children():",
                "        inner.forward = partial(checkpoint, inner.forward, use_reentrant=False)"
            ]
        );
        assert_eq!(batch_code(1, 2)[..3][2], "(loss / 2).backward()");
        assert_eq!(batch_code(3, 2), ["batch_size = batch_size * 3 // 2"]);
        assert_eq!(loop_over("Sequential.*")[0], "for block in model.children():");
        assert_eq!(loop_over("Net.it*s.*")[2], r#"    if re.fullmatch(r"it[^.]*s\.[^.]*", name):"#);
        assert_eq!(loop_over("GPT.**.mlp")[2], r#"    if re.fullmatch(r".*\.mlp", name):"#);
        assert_eq!(loop_over("G**.mlp")[2], r#"    if re.fullmatch(r".*\.mlp", "." + name):"#);
        assert_eq!(loop_over("Net.a[\"0 .?")[2], r#"    if re.fullmatch(r"a\[\x220\x20\..", name):"#);
        assert_eq!(
            loop_over("GPT"),
            ["model.forward = partial(checkpoint, model.forward, use_reentrant=False)"]
        );
    }

    #[test]
    fn advise_gives_the_cost_of_a_checkpoint_by_forward_and_backward() {
        let again = OpsAgain { ops: 10, of: 40, has_backward: true, ..OpsAgain::default() };
        assert!(
            checkpoint_costs(&again)
                .ends_with("10 more op calls to the 40 of a step's forward and backward (25 %)")
        );
        let cut = OpsAgain { has_backward: false, has_batch_norm: true, ..again };
        let costs = checkpoint_costs(&cut);
        assert!(costs.contains("share is unknown") && costs.ends_with("statistics twice a step"), "{costs}");
    }

    #[test]
    fn advise_groups_the_modules_that_are_called() {
        // A list in a list: neither GPT.h nor GPT.h.0 is called, so the pattern continues to the next level.
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
