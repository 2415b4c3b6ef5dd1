//! A simulated cluster: a few ranks of a distributed job run, and the others are *stand-ins*.
//!
//! - [`ranks`]: the ranks that `--ranks` names.
//! - [`torchrun`]: the options of torchrun, whose ranks this command starts itself; [`accelerate`] and [`deepspeed`]:
//!   the launchers that do the same.
//! - [`job`]: the shape of the job, and the environment and the command line of each rank.
//! - [`store`]: the rendezvous store of a rank, which answers for the stand-ins.
//! - [`members`]: starts the ranks and waits for them.
//!
//! Among stand-ins a rank never meets another rank: each has a store of its own, the simulated NCCL answers for all
//! others, and `python/stand_ins.py` stands in for gloo.

mod accelerate;
mod deepspeed;
pub(crate) mod job;
pub(crate) mod members;
mod ranks;
mod store;
mod store_values;
mod torchrun;
