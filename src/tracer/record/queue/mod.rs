//! The event queue, from the program's threads to the writer thread.
//!
//! Each thread has a lane ([`lane`]) and fills chunks of a common pool ([`chunk_pool`]). When the pool is
//! empty, events go to the overflow list ([`overflow`]). The writer thread merges the lanes by clock
//! ([`merge`]).

pub(crate) mod chunk_pool;
pub(crate) mod event_queue;
pub(crate) mod journal_header;
pub(crate) mod lane;
pub(crate) mod merge;
pub(crate) mod overflow;

#[cfg(test)]
mod tests;
