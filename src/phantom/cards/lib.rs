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
pub use fault::{ALLOCATIONS, Fault, FaultError, FaultKind, Moment, parse_faults};
pub use memtrace_util::phantom_variables::{
    CARD_VARIABLE, DYNAMIC_VARIABLE, FAULT_VARIABLE, HOST_VALUES_VARIABLE, PAST_OOM_VARIABLE,
};
pub use spec::{ADDRESSES, MAX_DEVICES, Spec, SpecError};
pub use table::CARDS;

/// CUDA's own environment variable. With the value `EAGER`, CUDA loads all kernels at the start.
pub const LOADING_VARIABLE: &str = "CUDA_MODULE_LOADING";
