//! Reads memory that may not be mapped. The kernel reads the memory, through a pipe. The kernel returns an
//! error where a direct load would crash the process.

use std::ffi::{c_int, c_void};

/// The lowest address at which an object can be. A read below this address fails without a system call.
const LOWEST: usize = 4096;

/// The pipe through which reads go.
pub(crate) struct GuardedMemory {
    ends: [c_int; 2],
}

impl GuardedMemory {
    /// Opens the pipe. Returns `None` if the process cannot open more files.
    pub(crate) fn open() -> Option<GuardedMemory> {
        let mut ends = [0; 2];
        // SAFETY: `ends` has room for two descriptors.
        let opened = unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC | libc::O_NONBLOCK) } == 0;
        opened.then_some(GuardedMemory { ends })
    }

    /// Reads the words at `address`. Returns `None` if some of the words are unreadable, or if no object can
    /// be at this address.
    pub(crate) fn words<const WORDS: usize>(&self, address: usize) -> Option<[usize; WORDS]> {
        const { assert!(WORDS * 8 <= 4096, "a pipe accepts at most 4,096 bytes at once") };
        let mut words = [0; WORDS];
        if address < LOWEST || !address.is_multiple_of(8) {
            return None;
        }
        // Use the raw system call, because another tool may hook the function `write` and read the bytes in
        // the process, which would crash at an unreadable address. SAFETY: the kernel reports an unreadable
        // address as an error.
        let written =
            unsafe { libc::syscall(libc::SYS_write, self.ends[1], address as *const c_void, WORDS * 8) };
        if written <= 0 {
            return None;
        }
        // SAFETY: `words` has room for the number of bytes that was written.
        let read = unsafe { libc::read(self.ends[0], words.as_mut_ptr().cast(), written as usize) };
        (read == (WORDS * 8) as isize).then_some(words)
    }

    /// Reads the word at `address`. Returns `None` if the word is unreadable or `address` is not aligned.
    pub(crate) fn word(&self, address: usize) -> Option<usize> {
        self.words::<1>(address).map(|[word]| word)
    }

    /// Reads the byte at `address`. Returns `None` if the byte is unreadable.
    pub(crate) fn byte(&self, address: usize) -> Option<u8> {
        Some((self.word(address & !7)? >> (address % 8 * 8)) as u8)
    }
}

impl Drop for GuardedMemory {
    fn drop(&mut self) {
        for end in self.ends {
            // SAFETY: both ends are open, and belong to this value.
            unsafe { libc::close(end) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guarded_reads_fail_safely_where_a_load_would_crash() {
        let memory = GuardedMemory::open().unwrap();
        let words = [1usize, 0x0203, usize::MAX];
        let address = words.as_ptr() as usize;
        assert_eq!(memory.words::<3>(address), Some(words));
        assert_eq!((memory.byte(address + 8), memory.byte(address + 9)), (Some(3), Some(2)));
        assert_eq!((memory.word(0), memory.word(address + 1), memory.word(1 << 40)), (None, None, None));
        assert_eq!(memory.word(address), Some(1), "a failed read leaves nothing in the pipe");
    }
}
