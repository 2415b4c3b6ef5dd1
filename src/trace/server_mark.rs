//! The marks about the inference server in a process (vLLM). Parses their names, which `held.py` writes.

use crate::key_values::value_of;

/// What a mark says about the server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ServerMark {
    /// The size of the KV cache.
    Cache {
        /// The number of blocks.
        blocks: i64,
        /// The number of tokens in these blocks.
        tokens: i64,
    },
    /// The share of the card to which the server limits itself.
    Share {
        /// `gpu_memory_utilization`, from 0 to 1.
        part: f64,
        /// The number of blocks of the KV cache; 0 if there is no cache yet.
        blocks: i64,
        /// True for the mark at the end of the script.
        has_ended: bool,
    },
}

impl ServerMark {
    /// Parses the name of a mark, such as `kv_cache: blocks=1234 tokens=19744` or
    /// `vllm: gpu_memory_utilization=0.9 blocks=1234 ended`.
    #[must_use]
    pub fn parse(name: &str) -> Option<ServerMark> {
        let (kind, words) = name.split_once(": ")?;
        let value = |key: &str| value_of(words, key);
        let number = |key: &str| value(key)?.parse::<i64>().ok().filter(|number| *number >= 0);
        match kind {
            "kv_cache" => Some(ServerMark::Cache { blocks: number("blocks")?, tokens: number("tokens")? }),
            "vllm" => {
                let part = value("gpu_memory_utilization")?.parse().ok()?;
                let has_ended = words.ends_with(" ended");
                let share = ServerMark::Share { part, blocks: number("blocks")?, has_ended };
                (0.0..=1.0).contains(&part).then_some(share)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_servers_mark_is_parsed() {
        let cache = ServerMark::Cache { blocks: 1234, tokens: 19744 };
        assert_eq!(ServerMark::parse("kv_cache: blocks=1234 tokens=19744"), Some(cache));
        let share = |has_ended| Some(ServerMark::Share { part: 0.15, blocks: 0, has_ended });
        assert_eq!(ServerMark::parse("vllm: gpu_memory_utilization=0.15 blocks=0 ended"), share(true));
        assert_eq!(ServerMark::parse("vllm: gpu_memory_utilization=0.15 blocks=0"), share(false));
        for text in [
            "",
            "vllm: ",
            "vllm: gpu_memory_utilization=0.9 ended",
            "vllm: gpu_memory_utilization=nan blocks=0 ended",
            "vllm: gpu_memory_utilization=9 blocks=0 ended",
            "vllm: gpu_memory_utilization=0.9 blocks=-1 ended",
            "kv_cache: gpu_memory_utilization=0.9 blocks=0 ended",
            "kv_cache: blocks=1234",
            "kv_cache",
        ] {
            assert_eq!(ServerMark::parse(text), None, "{text}");
        }
    }
}
