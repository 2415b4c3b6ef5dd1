//! The live blocks at a moment, grouped by each key as in `memtrace peak`.

use serde_json::{Value, json};

use crate::options::Options;
use crate::state::group::{KEYS, Key, sorted};
use crate::state::replay::{Block, Replay};

/// The maximum number of lines of each list. One more line has the sum of the rest.
const MOST: usize = 200;

/// Returns the blocks grouped by each of [`KEYS`] as lists of `[key, bytes, blocks, modules]`, the largest
/// first. `modules` is the number of modules in a group of modules, which is above 1 for repeated layers. The
/// line for the remaining groups lacks it.
pub(super) fn json(blocks: &[Block], replay: &Replay) -> Value {
    let mut all = serde_json::Map::new();
    for name in KEYS {
        let mut options = Options::default();
        options.values.insert("by", (*name).to_owned());
        // Only an invalid `--depth` is an error, and these options have no depth.
        let Ok(key) = Key::from_options(&options) else { continue };
        let groups = sorted(key.on_modules(replay, blocks).groups(blocks, &replay.symbols));
        let (first, rest) = groups.split_at(groups.len().min(MOST));
        let mut lines: Vec<Value> = first
            .iter()
            .map(|(name, group)| json!([name, group.bytes, group.blocks, group.modules]))
            .collect();
        if !rest.is_empty() {
            let bytes: i64 = rest.iter().map(|(_, group)| group.bytes).sum();
            let count: u64 = rest.iter().map(|(_, group)| group.blocks).sum();
            lines.push(json!([format!("({} more)", rest.len()), bytes, count]));
        }
        all.insert((*name).to_owned(), lines.into());
    }
    Value::Object(all)
}
