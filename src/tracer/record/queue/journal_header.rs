//! The header of the journal: the data that recovery needs in addition to the chunks.
//!
//! After the recorder has started, only the writer thread stores here. The exceptions are the counts of lost
//! events and the answer to a request of a command.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_trace::journal::{
    DetailAnswer, DetailRequest, LOSS_SHARDS, Losses, MAX_META, MAX_PATH, MAX_WORDS, Written,
};

use super::chunk_pool::{ChunkPool, ChunkReader};

/// The two JSON texts of the meta row that the header holds.
#[derive(Clone, Copy)]
pub(crate) enum MetaText {
    /// The text at the start of the trace, without the values that CUDA provides.
    First = 0,
    /// The complete text, once CUDA runs.
    Described = 1,
}

impl ChunkPool {
    /// Stores the path of the trace in the journal, before the trace exists. Stores nothing if the path is
    /// longer than `MAX_PATH`.
    pub(crate) fn set_trace(&self, path: &Path) {
        use std::os::unix::ffi::OsStrExt;
        let bytes = path.as_os_str().as_bytes();
        if bytes.len() > MAX_PATH {
            return;
        }
        let header = self.header();
        header.trace_len.store(0, Ordering::Release);
        // SAFETY: only one thread at a time writes the path: first the thread that starts the recorder, then
        // the writer thread. Nothing in this process reads it.
        unsafe { (&mut *header.trace.get())[..bytes.len()].copy_from_slice(bytes) };
        header.trace_len.store(bytes.len() as u64, Ordering::Release);
    }

    /// Stores a JSON text of the meta row in the journal. The caller stores each of the two texts only once.
    /// Returns false if the text is too long.
    pub(crate) fn set_meta(&self, place: MetaText, json: &str) -> bool {
        if json.len() > MAX_META {
            return false;
        }
        let header = self.header();
        // SAFETY: as for the path; a reader of the journal reads the text only after its length is stored.
        unsafe { (&mut *header.meta[place as usize].get())[..json.len()].copy_from_slice(json.as_bytes()) };
        header.meta_len[place as usize].store(json.len() as u64, Ordering::Release);
        true
    }

    /// Stores a checkpoint. `written` has the valid lengths of the files, and `part` is the part to which
    /// `written.csv_len` belongs. `overflow_written` is the number of events of the overflow list that are in
    /// the trace. `consumed` has the used chunks, each with the number of slots whose events are in the
    /// trace.
    pub(crate) fn checkpoint(
        &self,
        written: Written,
        part: u32,
        overflow_written: u64,
        consumed: impl Iterator<Item = (ChunkReader, usize)>,
    ) {
        let header = self.header();
        let next = header.checkpoints.load(Ordering::Relaxed) + 1;
        let place = (next & 1) as usize;
        for (reader, events) in consumed {
            self.chunk(reader.number()).header.consumed[place].store(events as u32, Ordering::Relaxed);
        }
        header.csv_len[place].store(written.csv_len, Ordering::Relaxed);
        header.names_len[place].store(written.names_len, Ordering::Relaxed);
        header.reported_lost[place].store(written.reported_lost, Ordering::Relaxed);
        header.overflow_written[place].store(overflow_written, Ordering::Relaxed);
        header.part[place].store(u64::from(part), Ordering::Relaxed);
        // `Release`, because a reader of the journal must see the values above once it sees the new number.
        header.checkpoints.store(next, Ordering::Release);
    }

    /// Stores the words that the end row would have now, for a process that is killed before it writes its
    /// end row. If the text is too long, only the words that fit are stored.
    pub(crate) fn set_end_words(&self, words: &str) {
        let header = self.header();
        let next = header.words_stored.load(Ordering::Relaxed) + 1;
        let place = (next & 1) as usize;
        let fits = match words.as_bytes().get(..=MAX_WORDS) {
            None => words,
            Some(more) => more.iter().rposition(|byte| *byte == b' ').map_or("", |end| &words[..end]),
        };
        // SAFETY: as for the path; a reader of the journal reads only the text that `words_stored`, stored
        // below, selects.
        unsafe { (&mut *header.words[place].get())[..fits.len()].copy_from_slice(fits.as_bytes()) };
        header.words_len[place].store(fits.len() as u64, Ordering::Relaxed);
        // `Release`, because a reader of the journal must see the text above once it sees the new number.
        header.words_stored.store(next, Ordering::Release);
    }

    /// Takes a request that a command has written into the journal since the last call, and answers it.
    /// Returns its `steps`.
    pub(crate) fn take_detail_request(&self, answer: DetailAnswer) -> Option<u32> {
        let header = self.header();
        let asked = header.detail_asked.load(Ordering::Acquire);
        if asked == header.detail_taken.load(Ordering::Relaxed) {
            return None;
        }
        header.detail_answer.store(answer.pack(), Ordering::Relaxed);
        header.detail_taken.store(asked, Ordering::Release);
        Some(DetailRequest::unpack(asked).steps)
    }

    /// Returns the counters in which a lane counts its lost events. Several lanes may share them.
    pub(crate) fn losses(&self, lane: u32) -> &Losses {
        &self.header().losses[lane as usize % LOSS_SHARDS]
    }

    /// Returns the number of events dropped so far.
    pub(crate) fn dropped(&self) -> u64 {
        self.sum(|losses| &losses.dropped)
    }

    /// Returns the number of events that were put on the overflow list so far.
    pub(crate) fn overflowed(&self) -> u64 {
        self.sum(|losses| &losses.overflowed)
    }

    /// Sums a counter over the lanes. The sum wraps, because another process may have written any value into
    /// the file.
    fn sum(&self, count: impl Fn(&Losses) -> &AtomicU64) -> u64 {
        let counts = self.header().losses.iter().map(|losses| count(losses).load(Ordering::Relaxed));
        counts.fold(0, u64::wrapping_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memtrace_trace::journal::{CHUNK_BYTES, Run};

    #[test]
    fn the_journal_has_two_meta_texts_and_refuses_a_long_one() {
        let pool = ChunkPool::new(8 * CHUNK_BYTES, &[], "none", Run::default()).unwrap();
        assert!(pool.set_meta(MetaText::First, "{}"));
        assert!(!pool.set_meta(MetaText::Described, &"x".repeat(MAX_META + 1)));
        assert!(pool.set_meta(MetaText::Described, &"x".repeat(MAX_META)));
        let lengths = pool.header().meta_len.iter().map(|length| length.load(Ordering::Relaxed));
        assert!(lengths.eq([2, MAX_META as u64]));
    }

    #[test]
    fn the_journal_keeps_the_last_end_words_and_of_a_long_text_whole_words() {
        let pool = ChunkPool::new(8 * CHUNK_BYTES, &[], "none", Run::default()).unwrap();
        let stored = || {
            let header = pool.header();
            let place = (header.words_stored.load(Ordering::Relaxed) & 1) as usize;
            let length = header.words_len[place].load(Ordering::Relaxed) as usize;
            // SAFETY: nobody else uses this pool.
            String::from_utf8(unsafe { (&*header.words[place].get())[..length].to_vec() }).unwrap()
        };
        assert_eq!(stored(), "");
        pool.set_end_words("a=1 b=2");
        pool.set_end_words("a=1 b=3");
        assert_eq!(stored(), "a=1 b=3");
        let exact = "x".repeat(MAX_WORDS);
        pool.set_end_words(&exact);
        assert_eq!(stored(), exact);
        pool.set_end_words(&format!("a=1 b={exact}"));
        assert_eq!(stored(), "a=1");
        pool.set_end_words(&format!("{exact}x"));
        assert_eq!(stored(), "");
    }

    #[test]
    fn the_journal_sums_the_losses_of_all_lanes() {
        let pool = ChunkPool::new(8 * CHUNK_BYTES, &[], "none", Run::default()).unwrap();
        for lane in 0..1000 {
            pool.losses(lane).dropped.fetch_add(2, Ordering::Relaxed);
            pool.losses(lane).overflowed.fetch_add(1, Ordering::Relaxed);
        }
        assert_eq!((pool.dropped(), pool.overflowed()), (2000, 1000));
    }
}
