//! The JSON in the first row: the run, its devices and its settings.

use serde::{Deserialize, Serialize};

use crate::rounding::Rounding;
use crate::text::printable_json;

/// The `run_id` of a trace that was made from a memory snapshot of PyTorch.
pub const SNAPSHOT_RUN: &str = "snapshot";

/// The JSON in the `name` of the meta row. Fields are only ever added. A reader uses the default of a field
/// that an older trace does not have.
///
/// ```
/// use memtrace_trace::Meta;
///
/// let old = r#"{"schema": "memtrace/1", "rank": 3, "argv": ["train.py"]}"#;
/// let meta: Meta = serde_json::from_str(old)?;
/// assert_eq!((meta.rank, meta.argv[0].as_str()), (3, "train.py"));
/// assert!(meta.detail.is_empty());
/// # Ok::<(), serde_json::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Meta {
    /// [`crate::SCHEMA_VERSION`].
    pub schema: String,
    /// The version of memtrace that wrote the trace.
    pub memtrace: String,
    /// The wall-clock time at `ts_ns` 0, in ns since the Unix epoch.
    pub start_unix_ns: i64,
    /// The host's name.
    pub host: String,
    /// The id of the launch, the same for all of its processes.
    pub run_id: String,
    /// The distributed rank; 0 for a single process.
    pub rank: i32,
    /// The number of ranks; 1 for a single process.
    pub world_size: i32,
    /// The command line, with secrets redacted.
    pub argv: Vec<String>,
    /// One entry per visible device.
    pub devices: Vec<Device>,
    /// The caching allocator's settings.
    pub allocator: Allocator,
    /// The detected versions: `cuda_runtime`, `cuda_driver`, `torch`.
    pub versions: std::collections::BTreeMap<String, String>,
    /// The path of this trace's journal; empty without a journal.
    pub journal: String,
    /// The part number of this file in a rotated trace: 1, 2, 3, ...; 0 in older traces.
    pub part: u32,
    /// The number of rows after the meta row that list the memory that was live when this part began.
    pub opening_rows: u64,
    /// The value of `MEMTRACE_KEEP`; empty if all parts are kept.
    pub keep: String,
    /// The description of the simulated GPU; null for a real GPU.
    pub phantom: serde_json::Value,
    /// The value of `MEMTRACE_OPS`; empty in older traces.
    pub ops: String,
    /// True if modules and tags were recorded (`MEMTRACE_MODULES`); false in older traces.
    pub modules: bool,
    /// The value of `MEMTRACE_DETAIL`; empty in older traces, in which every step is detailed.
    pub detail: String,
    /// True if this file may have `brief` rows ([`EventName::Brief`](crate::EventName::Brief)).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub brief: bool,
    /// The id of the machine's boot; empty if unknown.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub boot: String,
    /// The folder of the cgroup whose memory limit applies to the process; empty if no cgroup counts its
    /// memory.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cgroup: String,
    /// The inode of that folder, which no other cgroup of the same boot has; 0 if unknown.
    #[serde(skip_serializing_if = "is_zero")]
    pub cgroup_id: u64,
    /// The working directory at the start of the trace; empty if unknown.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cwd: String,
    /// The ancestors of this process at the start of the trace, its parent first; empty if unknown.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ancestors: Vec<u32>,
    /// The capabilities that this process lacked, one sentence each.
    pub degraded: Vec<String>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// A visible device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Device {
    /// The CUDA ordinal.
    pub ordinal: i32,
    /// The name; empty if unknown.
    pub name: String,
    /// The memory in bytes; 0 if unknown.
    pub total_bytes: i64,
}

impl Meta {
    /// Returns the text of the meta row. Control characters in the command line are escaped.
    ///
    /// # Errors
    /// Never returns an error in practice: every field can be expressed in JSON.
    pub fn to_json(&self) -> serde_json::Result<String> {
        Ok(printable_json(&serde_json::to_string(self)?).into_owned())
    }

    /// Returns true if the trace was made from a memory snapshot of PyTorch. Its modules, phases and categories
    /// are then inferred from call stacks.
    #[must_use]
    pub fn is_snapshot(&self) -> bool {
        self.run_id == SNAPSHOT_RUN
    }

    /// Returns the device with this ordinal.
    #[must_use]
    pub fn device(&self, ordinal: i32) -> Option<&Device> {
        self.devices.iter().find(|device| device.ordinal == ordinal)
    }

    /// Returns true if the simulated GPU granted requests past its capacity (`--past-oom`).
    #[must_use]
    pub fn goes_past_oom(&self) -> bool {
        !self.phantom[crate::end_row::NEEDED_BYTES].is_null()
    }

    /// Returns the memory of a device in bytes, or 0 if unknown.
    #[must_use]
    pub fn total_bytes(&self, ordinal: i32) -> i64 {
        self.device(ordinal).map_or(0, |device| device.total_bytes)
    }
}

/// The settings of torch's allocator.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Allocator {
    /// False if `PYTORCH_NO_CUDA_MEMORY_CACHING` is set.
    pub caching: bool,
    /// `native` or `cudaMallocAsync`.
    pub backend: String,
    /// The text of `PYTORCH_CUDA_ALLOC_CONF` or `PYTORCH_ALLOC_CONF`.
    pub conf: String,
}

impl Allocator {
    /// Returns the allocator's rounding of requested sizes.
    #[must_use]
    pub fn rounding(&self) -> Rounding {
        // A single number. It is 0 if the option is unset or lists a number per size.
        let divisions = self.option("roundup_power2_divisions").and_then(|value| value.parse().ok());
        Rounding { caching: self.caching, power2_divisions: divisions.unwrap_or(0) }
    }

    /// Returns the value of `name` in a `conf` such as `a:1,name:value,b:2`.
    #[must_use]
    pub fn option(&self, name: &str) -> Option<&str> {
        self.conf.split(',').find_map(|part| {
            let (key, value) = part.split_once(':')?;
            (key.trim() == name).then(|| value.trim())
        })
    }
}

impl Default for Allocator {
    fn default() -> Self {
        Allocator { caching: true, backend: "native".to_owned(), conf: String::new() }
    }
}

/// Returns the command line with `***` in place of the values of options that look like secrets, and of the user
/// and password in a URL.
#[must_use]
pub fn redact(argv: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut hide_next = false;
    argv.into_iter()
        .map(|word| {
            // A password may start with a dash; two dashes start the next option.
            if std::mem::take(&mut hide_next) && !word.starts_with("--") {
                return "***".to_owned();
            }
            let word = without_secret_parameters(&without_user(&word));
            if let Some(end) = end_of_secret_key(&word) {
                return format!("{}=***", &word[..end]);
            }
            hide_next = word.starts_with('-') && !word.contains('=') && looks_secret(&word);
            word
        })
        .collect()
}

/// Returns the index of the first `=` that follows the name of a secret: in `--env=HF_TOKEN=abc` the second.
/// The parameters of a URL are left out; see [`without_secret_parameters`].
fn end_of_secret_key(word: &str) -> Option<usize> {
    let mut start = 0;
    for (end, _) in word.match_indices('=') {
        let key = &word[start..end];
        if key.contains("://") {
            return None;
        }
        if looks_secret(key) {
            return Some(end);
        }
        start = end + 1;
    }
    None
}

/// Replaces the user and the password of a URL such as `postgres://user:password@host/data` by `***`.
fn without_user(word: &str) -> String {
    let hide = |(number, part): (usize, &str)| {
        let host = &part[..part.find('/').unwrap_or(part.len())];
        match host.rfind('@') {
            Some(at) if number > 0 => format!("***{}", &part[at..]),
            _ => part.to_owned(),
        }
    };
    word.split("://").enumerate().map(hide).collect::<Vec<_>>().join("://")
}

/// Replaces the values of the parameters of a URL that look like secrets by `***`, such as the signature of
/// `https://host/data?X-Amz-Signature=1a2b`.
fn without_secret_parameters(word: &str) -> String {
    let Some(host) = word.find("://") else { return word.to_owned() };
    let hide = |(number, piece): (usize, &str)| match piece.split_once('=') {
        Some((name, value)) if number > 0 && looks_secret(name) => {
            let end = value.find(['?', '&', '#']).map_or("", |end| &value[end..]);
            format!("{name}=***{end}")
        }
        _ => piece.to_owned(),
    };
    let pieces = word[host..].split_inclusive(['?', '&', '#']).enumerate().map(hide);
    format!("{}{}", &word[..host], pieces.collect::<String>())
}

/// The ends of words that name a secret.
const SECRETS: [&str; 12] = [
    "token",
    "secret",
    "secrets",
    "password",
    "passwd",
    "passphrase",
    "auth",
    "signature",
    "sig",
    "apikey",
    "credential",
    "credentials",
];
/// The words before `key` that make it a secret.
const KEYS: [&str; 5] = ["api", "access", "private", "secret", "encryption"];

fn looks_secret(option: &str) -> bool {
    let option = option.to_ascii_lowercase();
    // The end of a word counts, because `--tokenizer` and `--max-tokens` have no secret, but `accessToken` has.
    let is_secret = |word: &str| SECRETS.iter().any(|secret| word.ends_with(secret));
    let is_key =
        |kind: &str| ["-key", "_key", "key"].iter().any(|key| option.contains(&format!("{kind}{key}")));
    KEYS.into_iter().any(is_key) || option.split(['-', '_', '.']).any(is_secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_redacted_from_the_command_line() {
        let argv = "train.py --hf-token abc --lr=1 WANDB_API_KEY=xyz --token --next --tokenizer gpt2 --max-tokens=512 \
                    --db.password x --accessToken=y";
        let redacted = |argv: &str| redact(argv.split_whitespace().map(str::to_owned)).join(" ");
        let shown = redacted(argv);
        let expected = "train.py --hf-token *** --lr=1 WANDB_API_KEY=*** --token --next --tokenizer gpt2 --max-tokens=512 \
                        --db.password *** --accessToken=***";
        assert_eq!(shown, expected);
        let argv = "--password -abc --db=postgres://u:p@w@host/d?x=a@b redis://:pw@host https://host/a@b s3://x --token -";
        let expected = "--password *** --db=postgres://***@host/d?x=a@b redis://***@host https://host/a@b s3://x --token ***";
        assert_eq!(redacted(argv), expected);
        let argv = "--s3-access-key A --passphrase x --auth=y --author z --keys 3 \
                    --url=https://b/d?x=1&token=abc&y=2#access_token=q s3://b/token=5/d?X-Amz-Signature=1a";
        let expected = "--s3-access-key *** --passphrase *** --auth=*** --author z --keys 3 \
                        --url=https://b/d?x=1&token=***&y=2#access_token=*** s3://b/token=5/d?X-Amz-Signature=***";
        assert_eq!(redacted(argv), expected);
        let argv = "--env=HF_TOKEN=abc --override=wandb.api_key=a=b --set=lr=1 --x=a=https://b/d?lr=1";
        let expected = "--env=HF_TOKEN=*** --override=wandb.api_key=*** --set=lr=1 --x=a=https://b/d?lr=1";
        assert_eq!(redacted(argv), expected);
    }

    #[test]
    fn a_command_line_reaches_the_file_without_control_characters_and_comes_back() {
        let argv = vec!["\x1b[2J\u{9b}31m\u{202e}".to_owned()];
        let meta = Meta { argv, ..Meta::default() };
        let json = meta.to_json().unwrap();
        assert!(json.contains(r"\u001b[2J\u009b31m\u202e"), "{json}");
        assert_eq!(serde_json::from_str::<Meta>(&json).unwrap(), meta);
    }

    #[test]
    fn a_trace_of_an_older_version_reads_with_defaults() {
        let meta: Meta = serde_json::from_str(r#"{"schema":"memtrace/1","unheard_of":1}"#).unwrap();
        assert!(meta.allocator.caching);
        assert!(meta.phantom.is_null());
    }
}
