//! This process's part in the simulated machine: its slot in the table that the machine's processes share.
//!
//! Without the table (no shared memory, or all slots taken) the process has its cards for itself.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use memtrace_cards::{CARD_VARIABLE, Spec};
use memtrace_machine::process::Process;
use memtrace_machine::table::{Slot, Table, WORDS};
use memtrace_machine::{MACHINE_VARIABLE, files};

use crate::core::clock::DeviceClock;
use crate::core::driver_version::driver_version;
use crate::core::unified;

/// Makes this process and its children one machine, unless it belongs to one already.
#[ctor::ctor(unsafe)]
fn begin_machine() {
    if std::env::var_os(MACHINE_VARIABLE).is_none() {
        // SAFETY: a constructor of a preloaded library runs before the program, which has one thread then.
        unsafe { std::env::set_var(MACHINE_VARIABLE, files::new_id()) };
    }
}

fn request() -> String {
    std::env::var(CARD_VARIABLE).unwrap_or_default()
}

/// Returns the path of the table's file, or `None` if the process belongs to no machine.
fn path() -> Option<&'static Path> {
    static PATH: OnceLock<Option<PathBuf>> = OnceLock::new();
    let path = || Some(files::path_of(&std::env::var(MACHINE_VARIABLE).ok()?, &request()));
    PATH.get_or_init(path).as_deref()
}

/// Returns the table of the machine, or `None` if the process has its cards for itself.
pub(crate) fn table() -> Option<Table<'static>> {
    static TABLE: OnceLock<Option<Table<'static>>> = OnceLock::new();
    *TABLE.get_or_init(|| match files::open_or_create(path()?, &request()) {
        Ok(file) => map(file),
        Err(error) => {
            eprintln!(
                "memtrace: the processes of this run do not share the simulated GPU, and nvidia-smi does not \
                 show them: cannot open the table in /dev/shm: {error}"
            );
            None
        }
    })
}

fn map(file: File) -> Option<Table<'static>> {
    let length = WORDS * 8;
    let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    // SAFETY: a new mapping of an open file.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, file.as_raw_fd(), 0) };
    // The file must stay open, because closing it would release this process's lock on it.
    std::mem::forget(file);
    if base == libc::MAP_FAILED {
        return None;
    }
    // SAFETY: the mapping has this length, is aligned to a page and never unmapped. `open_or_create` has checked
    // the length of the file, which no process changes. All processes access its words as atomic ones.
    let words = unsafe { std::slice::from_raw_parts(base.cast::<AtomicU64>().cast_const(), WORDS) };
    Table::new(words)
}

/// Returns the slot of this process, which the first call takes. Returns `None` in the child of a fork.
fn slot() -> Option<(Table<'static>, Slot)> {
    static OWN: OnceLock<(u32, Option<Slot>)> = OnceLock::new();
    let table = table()?;
    let (pid, slot) = OWN.get_or_init(|| (std::process::id(), claim(table)));
    if *pid == std::process::id() {
        return Some((table, (*slot)?));
    }
    // CUDA does not work in the child of a process that has used it. A child that uses it anyway is not
    // listed, so that it does not change the figures of its parent.
    None
}

fn claim(table: Table<'static>) -> Option<Slot> {
    let slot = table.claim(Process::current());
    if slot.is_none() {
        eprintln!(
            "memtrace: too many processes use this simulated machine: nvidia-smi does not show this one"
        );
    }
    slot
}

/// This process's share of one card.
#[derive(Debug)]
pub(crate) struct Share {
    /// The position of the card in the machine.
    card: usize,
    /// The size in bytes of the context that this process creates on the card.
    context: u64,
    /// True if the card shares the machine's memory.
    is_unified: bool,
    clock: Arc<DeviceClock>,
    entered: AtomicBool,
}

impl Share {
    /// Creates the share of the card at this position.
    pub(crate) fn new(card: usize, spec: &Spec, clock: Arc<DeviceClock>) -> Self {
        let is_unified = spec.base.unified().is_some();
        Self { card, context: spec.context, is_unified, clock, entered: false.into() }
    }

    /// Returns the position of the card in the machine.
    pub(crate) fn card(&self) -> usize {
        self.card
    }

    /// Creates the context on the card, if the process has none there.
    #[inline]
    pub(crate) fn enter(&self) {
        if !self.entered.load(Ordering::Relaxed) {
            self.create_context();
        }
    }

    #[cold]
    fn create_context(&self) {
        self.entered.store(true, Ordering::Relaxed);
        if let Some((table, slot)) = slot() {
            table.set_context(slot, self.card, self.context);
            self.clock.show(table.busy(slot, self.card));
            table.set_cuda_version(slot, driver_version().unsigned_abs());
        }
    }

    /// Stores the bytes that the process has allocated on the card, and returns true, if their sum with the
    /// other processes' bytes is at most `limit`. Otherwise stores nothing and returns false.
    pub(crate) fn try_set(&self, bytes: u64, limit: u64) -> bool {
        self.enter();
        let limit = if limit == u64::MAX { limit } else { limit.saturating_sub(self.host()) };
        let Some((table, slot)) = slot() else { return bytes <= limit };
        // Only one process at a time compares and stores, so that at most one of two gets the last bytes.
        let _locked = table.lock_card(slot, self.card);
        let fits = || bytes.saturating_add(table.bytes_of_others(Some(slot), self.card)) <= limit;
        let fits = fits() || {
            table.clear_dead();
            fits()
        };
        if fits {
            table.set_allocated(slot, self.card, bytes);
        }
        fits
    }

    /// Returns true if the process has a context on the card.
    pub(crate) fn is_entered(&self) -> bool {
        self.entered.load(Ordering::Relaxed)
    }

    /// Stores the bytes that the process has allocated.
    pub(crate) fn set(&self, bytes: u64) {
        if let Some((table, slot)) = slot() {
            table.set_allocated(slot, self.card, bytes);
        }
    }

    /// Returns the host memory in bytes that the machine's programs use, or 0 if the card has its own memory.
    fn host(&self) -> u64 {
        if self.is_unified { unified::host_bytes(table()) } else { 0 }
    }

    /// Returns the bytes of the card that this process cannot allocate. These are the bytes that the
    /// machine's other processes use and, on a card with unified memory, also the host memory of all
    /// programs.
    pub(crate) fn others(&self) -> u64 {
        let Some((table, slot)) = slot() else { return self.host() };
        table.clear_dead();
        table.bytes_of_others(Some(slot), self.card).saturating_add(self.host())
    }
}
