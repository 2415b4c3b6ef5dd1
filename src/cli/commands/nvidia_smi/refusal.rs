//! Error messages, with the texts and exit statuses of nvidia-smi.

/// The exit status for "A supplied argument or flag is invalid" (nvidia-smi's manual, Return value).
pub(super) const INVALID: u8 = 2;
/// The exit status for "A query to find an object was unsuccessful".
pub(super) const NOT_FOUND: u8 = 6;
/// The exit status for "NVIDIA driver is not loaded".
pub(super) const NO_DRIVER: u8 = 9;
/// The exit status for "GPU is lost", as NVML numbers this error.
pub(super) const LOST: u8 = 15;

/// An error message.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The text, which nvidia-smi prints on stdout.
    pub(super) text: String,
    /// The exit status, such as [`INVALID`].
    pub(super) status: u8,
}

impl Refusal {
    pub(super) fn new(text: impl Into<String>, status: u8) -> Self {
        Self { text: text.into(), status }
    }
}
