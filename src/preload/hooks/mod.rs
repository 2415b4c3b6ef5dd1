//! The functions that stand before the real ones, a folder for each library that has them.

pub(crate) mod c_api;
mod cuda;
pub(crate) mod libc;
pub(crate) mod nvtx;
pub(crate) mod torch;

/// Before a fork: no lock may be held by a thread that the child does not have.
pub(crate) fn lock_for_fork() {
    nvtx::lock_for_fork();
    cuda::events::lock_for_fork();
    crate::attribution::private_pools::lock_for_fork();
}

/// After a fork, on both sides.
pub(crate) fn unlock_after_fork() {
    crate::attribution::private_pools::unlock_after_fork();
    cuda::events::unlock_after_fork();
    nvtx::unlock_after_fork();
}
