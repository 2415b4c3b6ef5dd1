//! A simulated cluster: the requested ranks of a distributed job run, and *stand-ins* answer for the other
//! ranks.
//!
//! - [`ranks`]: the ranks that `--ranks` names.
//! - [`launcher`]: the launcher of the job that a command line names.
//! - [`torchrun`], [`accelerate`], [`deepspeed`]: the command line of each launcher. This command replaces the launcher
//!   and starts its ranks itself.
//! - [`launched_ranks`]: the ranks that such a command line asks for.
//! - [`job`]: the shape of the job, and the environment and the command line of each rank.
//! - [`store`]: the rendezvous store of a rank, which answers for the stand-ins.
//! - [`members`]: starts the ranks and waits for them.
//!
//! Among stand-ins, a rank never communicates with another rank. Each rank has its own store, the simulated
//! NCCL answers for all other ranks, and `python/stand_ins.py` replaces gloo.

mod accelerate;
mod deepspeed;
pub(crate) mod job;
mod launched_ranks;
mod launcher;
pub(crate) mod members;
mod ranks;
mod store;
mod store_values;
mod torchrun;
