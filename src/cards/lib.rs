//! The cards that the phantom device can be, and how one is asked for.
//!
//! Both the phantom library and the command use this: the library to be the card, the command to
//! list the cards and to refuse a bad request before anything starts. No state, no I/O.
#![forbid(unsafe_code)]

mod cards;
mod spec;

pub use cards::{CARDS, Card, DEFAULT_CARD};
pub use spec::{Spec, SpecError};

/// The variable that holds the card as the user typed it.
pub const CARD_VARIABLE: &str = "MEMTRACE_PHANTOM";
