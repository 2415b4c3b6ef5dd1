//! The cards that the phantom device can simulate, and the syntax of a card request.
//!
//! The phantom library reads the properties of the card from this crate. The command uses it to list the
//! cards, and to reject an invalid request before anything starts. The crate has no state and does no I/O.
#![forbid(unsafe_code)]

mod card;
mod fault;
mod spec;
mod table;

pub use card::{Card, Context, DEFAULT_CARD, Links, Unified};
pub use fault::{
    ALLOCATIONS, FAULT_VARIABLE, Fault, FaultError, FaultKind, HOST_VALUES_VARIABLE, Moment,
    PAST_OOM_VARIABLE, parse_faults,
};
pub use spec::{ADDRESSES, MAX_DEVICES, Spec, SpecError};
pub use table::CARDS;

/// The environment variable with the requested card, as the user typed it.
pub const CARD_VARIABLE: &str = "MEMTRACE_PHANTOM";

/// CUDA's own environment variable. With the value `EAGER`, CUDA loads all kernels at the start.
pub const LOADING_VARIABLE: &str = "CUDA_MODULE_LOADING";
