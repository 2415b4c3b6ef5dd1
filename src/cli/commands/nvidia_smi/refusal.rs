//! Refusals: nvidia-smi's texts and exit statuses.

/// "A supplied argument or flag is invalid" (nvidia-smi's manual, Return value).
pub(super) const INVALID: u8 = 2;
/// "A query to find an object was unsuccessful".
pub(super) const NOT_FOUND: u8 = 6;
/// "NVIDIA driver is not loaded".
pub(super) const NO_DRIVER: u8 = 9;
/// "GPU is lost", as NVML numbers it.
pub(super) const LOST: u8 = 15;

/// A refusal.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The text, which nvidia-smi prints on stdout.
    pub(super) text: String,
    /// The exit status.
    pub(super) status: u8,
}

impl Refusal {
    pub(super) fn new(text: impl Into<String>, status: u8) -> Self {
        Self { text: text.into(), status }
    }
}
