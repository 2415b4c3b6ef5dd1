//! Compresses the trace and its parts (`MEMTRACE_COMPRESS`).
//!
//! A part is compressed while it is written: whenever the file has enough new rows, a short-lived thread adds
//! them to the compressed copy. So little work is left when the program ends. The plain file stays until the
//! copy is complete, so recovery finds the file that it needs if the process is killed at any moment.
//!
//! The end of the program waits for the copies only while they make progress ([`PATIENCE`]): storage that no
//! longer answers would otherwise keep the program from ending.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use memtrace_trace::config::{Compression, Level};
use memtrace_trace::{files, private_file};

use super::output;
use super::thread::start_thread;
use crate::session::Session;

/// The minimum number of bytes of new rows for which a thread is started. [`LONGEST_PIECE`] is the maximum
/// number of bytes that one thread compresses.
const PIECE: u64 = 4 << 20;
const LONGEST_PIECE: u64 = 4 * PIECE;
/// The number of bytes that are read at once, and the approximate number that are written at once.
const BUFFER: usize = 256 << 10;
/// The level of zstd: a row takes about 16 bytes and 2.5 µs.
const LEVEL: i32 = 8;
/// The level for a program that writes faster than [`LEVEL`] can compress: a row takes about 22 bytes and 0.3
/// µs.
const FAST_LEVEL: i32 = 1;
/// The speed of [`FAST_LEVEL`] divided by the speed of [`LEVEL`].
const FASTER: u64 = 7;

/// The maximum time for which the end of the program waits for a compression without progress. The final sync
/// of a copy counts as one step, so this also bounds the sync.
const PATIENCE: Duration = Duration::from_secs(30);

/// Grows while a thread compresses.
static PROGRESS: AtomicU64 = AtomicU64::new(0);

fn note_progress() {
    PROGRESS.fetch_add(1, Ordering::Relaxed);
}

/// Compresses parts on separate threads.
pub(crate) struct Compressor {
    session: &'static Session,
    /// The copy of the part that is being written.
    current: Option<Current>,
    /// True if adding to the copy failed.
    has_failed: bool,
    /// The thread that compresses the newest finished part. The thread waits for the thread of the previous part
    /// first.
    newest: Option<JoinHandle<()>>,
    pending: PendingParts,
}

/// The finished parts whose threads have not ended.
#[derive(Default)]
struct PendingParts {
    /// A thread owns the path of its part.
    parts: Vec<Weak<PathBuf>>,
}

impl PendingParts {
    /// Adds a part. The thread that compresses it must own the result.
    fn add(&mut self, part: PathBuf) -> Arc<PathBuf> {
        let part = Arc::new(part);
        self.parts.retain(|known| known.strong_count() > 0);
        self.parts.push(Arc::downgrade(&part));
        part
    }

    /// Removes the unfinished copy of each part, without which its thread can no longer replace the part. Returns
    /// the parts.
    fn abandon(&mut self) -> Vec<Arc<PathBuf>> {
        let parts: Vec<_> = self.parts.drain(..).filter_map(|part| part.upgrade()).collect();
        for part in &parts {
            let _ = fs::remove_file(files::unfinished_copy(part));
        }
        parts
    }
}

/// A copy between two pieces, or the thread that adds a piece to it.
enum Current {
    Idle(PartCopy),
    Busy(JoinHandle<io::Result<PartCopy>>),
}

impl Current {
    /// Waits for the thread, if there is one.
    fn join(self) -> Option<PartCopy> {
        match self {
            Current::Idle(copy) => Some(copy),
            Current::Busy(thread) => thread.join().ok()?.ok(),
        }
    }
}

impl Compressor {
    pub(crate) fn new(session: &'static Session) -> Compressor {
        Compressor {
            session,
            current: None,
            has_failed: false,
            newest: None,
            pending: PendingParts::default(),
        }
    }

    /// Compresses the rows that a growing part has so far: `length` bytes of whole rows. A later call for the
    /// same part must not pass a smaller length, unless [`Compressor::restart`] was called in between.
    pub(crate) fn follow(&mut self, part: &Path, length: u64) {
        let how = self.session.settings.compress;
        if how == Compression::Off
            || matches!(&self.current, Some(Current::Busy(thread)) if !thread.is_finished())
        {
            return;
        }
        let copy = match self.current.take() {
            // After a failure, the part is compressed only when it ends, where a second failure is reported.
            None if length < PIECE || self.has_failed => return,
            None => PartCopy::new(part, how, LEVEL).ok(),
            Some(current) => current.join(),
        };
        self.has_failed = copy.is_none();
        let Some(mut copy) = copy else { return };
        if length < copy.done + PIECE {
            self.current = Some(Current::Idle(copy));
            return;
        }
        let to = length.min(copy.done + LONGEST_PIECE);
        let thread = start_thread("memtrace-pack", 2 << 20, move || copy.add(to).map(|()| copy));
        self.has_failed = thread.is_err();
        self.current = thread.ok().map(Current::Busy);
    }

    /// Discards the compressed copy of the part that is being written, because its last rows will be removed
    /// again.
    pub(crate) fn restart(&mut self) {
        drop(self.current.take().map(Current::join));
        self.has_failed = false;
    }

    /// Compresses a finished part, if the settings ask for it.
    pub(crate) fn add(&mut self, part: PathBuf) {
        let how = self.session.settings.compress;
        if how == Compression::Off {
            return;
        }
        let (say, log) = (self.session.say, self.session.settings.log);
        let (current, earlier) = (self.current.take(), self.newest.take());
        self.has_failed = false;
        let part = self.pending.add(part);
        let newest = start_thread("memtrace-pack", 2 << 20, move || {
            let copy = current.and_then(Current::join);
            if let Some(earlier) = earlier {
                let _ = earlier.join();
            }
            // A missing part was removed by `MEMTRACE_KEEP`, so this is not an error.
            if let Err(error) = compress(&part, how, copy)
                && log >= Level::Warn
                && error.kind() != io::ErrorKind::NotFound
            {
                say(&format!("{}: stays uncompressed: {error}", part.display()));
            }
        });
        self.newest = newest.ok();
    }

    /// Waits until every part is compressed, or until the compression makes no progress for [`PATIENCE`]. Calls
    /// `while_waiting` repeatedly in the meantime.
    pub(crate) fn finish(&mut self, while_waiting: impl Fn()) {
        let Some(thread) = self.newest.take() else { return };
        if wait(&thread, PATIENCE, while_waiting) {
            return;
        }
        for part in self.pending.abandon() {
            if self.session.settings.log >= Level::Warn {
                (self.session.say)(&format!(
                    "{}: stays uncompressed: the compression made no progress for {} s",
                    part.display(),
                    PATIENCE.as_secs()
                ));
            }
        }
    }
}

/// Waits until a thread ends. Returns false if [`PROGRESS`] does not grow for `patience`.
fn wait(thread: &JoinHandle<()>, patience: Duration, while_waiting: impl Fn()) -> bool {
    let (mut progress, mut since) = (PROGRESS.load(Ordering::Relaxed), Instant::now());
    while !thread.is_finished() {
        let now = PROGRESS.load(Ordering::Relaxed);
        if now != progress {
            (progress, since) = (now, Instant::now());
        } else if since.elapsed() > patience {
            return false;
        }
        while_waiting();
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}

/// Replaces a finished part with a compressed copy; `copy` is the copy made so far, if any. The copy gets its
/// final name when it is complete, and only then is the part removed. So nothing is lost if the process is
/// killed at any moment.
pub(super) fn compress(part: &Path, how: Compression, copy: Option<PartCopy>) -> io::Result<()> {
    let length = fs::metadata(part)?.len();
    // If much of the part is not compressed yet, the whole part is compressed again at the fast level. This
    // takes less time than compressing the rest at the current level.
    let is_late = |copy: &PartCopy| {
        let rest = length.saturating_sub(copy.done);
        how == Compression::Zst && rest > 2 * LONGEST_PIECE && rest * FASTER > length
    };
    let mut copy = match copy.filter(|copy| !is_late(copy)) {
        Some(copy) => copy,
        None if length > 2 * LONGEST_PIECE => PartCopy::new(part, how, FAST_LEVEL)?,
        None => PartCopy::new(part, how, LEVEL)?,
    };
    copy.add(length)?;
    copy.finish()
}

/// The compressed copy of a part, until it is complete. No file stays open between two pieces, because a
/// program may close descriptors that it does not know and then reuse their numbers for its own files.
pub(super) struct PartCopy {
    part: PathBuf,
    unfinished: PathBuf,
    whole: PathBuf,
    packer: Packer,
    /// The number of bytes of the part that are compressed.
    done: u64,
}

/// Compresses rows. The compressed bytes are collected in a vector until they are appended to the file.
enum Packer {
    Gz(flate2::write::GzEncoder<Vec<u8>>),
    // All pieces are in one frame, because some readers stop at the end of the first frame.
    Zst(zstd::stream::write::Encoder<'static, Vec<u8>>),
}

impl Packer {
    fn new(how: Compression, level: i32) -> io::Result<Packer> {
        let packed = Vec::with_capacity(2 * BUFFER);
        Ok(match how {
            Compression::Zst => {
                let mut packer = zstd::stream::write::Encoder::new(packed, level)?;
                packer.include_checksum(true)?;
                Packer::Zst(packer)
            }
            _ => Packer::Gz(flate2::write::GzEncoder::new(packed, flate2::Compression::fast())),
        })
    }

    fn write(&mut self, rows: &[u8]) -> io::Result<()> {
        match self {
            Packer::Gz(packer) => packer.write_all(rows),
            Packer::Zst(packer) => packer.write_all(rows),
        }
    }

    fn end(&mut self) -> io::Result<()> {
        match self {
            Packer::Gz(packer) => packer.try_finish(),
            Packer::Zst(packer) => packer.do_finish(),
        }
    }

    /// Returns the compressed bytes that are not in the file yet.
    fn packed(&mut self) -> &mut Vec<u8> {
        match self {
            Packer::Gz(packer) => packer.get_mut(),
            Packer::Zst(packer) => packer.get_mut(),
        }
    }
}

impl PartCopy {
    fn new(part: &Path, how: Compression, level: i32) -> io::Result<PartCopy> {
        let (whole, unfinished) = (files::compressed(part, how), files::unfinished_copy(part));
        let packer = Packer::new(how, level)?;
        drop(output::create_private(&unfinished)?);
        Ok(PartCopy { part: part.to_owned(), unfinished, whole, packer, done: 0 })
    }

    fn open(&self) -> io::Result<File> {
        private_file::reopen(&self.unfinished, OpenOptions::new().append(true))
    }

    /// Adds the bytes of the part up to `to`.
    fn add(&mut self, to: u64) -> io::Result<()> {
        let (mut rows, mut copy) = (File::open(&self.part)?, self.open()?);
        rows.seek(SeekFrom::Start(self.done))?;
        let mut buffer = vec![0; BUFFER];
        while self.done < to {
            let most = buffer.len().min((to - self.done) as usize);
            let got = rows.read(&mut buffer[..most])?;
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.packer.write(&buffer[..got])?;
            self.done += got as u64;
            note_progress();
            if self.packer.packed().len() >= BUFFER {
                copy.write_all(self.packer.packed())?;
                self.packer.packed().clear();
            }
        }
        copy.write_all(self.packer.packed())?;
        self.packer.packed().clear();
        Ok(())
    }

    /// Completes the copy and removes the part.
    fn finish(mut self) -> io::Result<()> {
        self.packer.end()?;
        let mut copy = self.open()?;
        copy.write_all(self.packer.packed())?;
        note_progress();
        copy.sync_all()?;
        output::publish(&self.unfinished, &self.whole)?;
        fs::remove_file(&self.part)
    }
}

impl Drop for PartCopy {
    /// Removes the unfinished file, if the copy is incomplete.
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.unfinished);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns lines that compress as well as rows do.
    fn lines(from: u64, to: u64) -> Vec<u8> {
        (from..to)
            .flat_map(|n| format!("{n},{},alloc,0,GPT.h.{}.mlp\n", n * 1013, n % 12).into_bytes())
            .collect()
    }

    fn read(path: &Path, how: Compression) -> Vec<u8> {
        let (mut bytes, file) = (Vec::new(), File::open(path).unwrap());
        match how {
            Compression::Zst => {
                // Some readers stop at the end of the first frame, so the copy must have only one. This
                // reader reads only the first.
                let mut reader = zstd::stream::read::Decoder::new(file).unwrap().single_frame();
                reader.read_to_end(&mut bytes).unwrap()
            }
            _ => flate2::read::GzDecoder::new(file).read_to_end(&mut bytes).unwrap(),
        };
        bytes
    }

    #[test]
    fn the_end_waits_for_a_compression_but_not_for_one_that_is_stuck() {
        let (unblock, blocked) = std::sync::mpsc::channel::<()>();
        let stuck = std::thread::spawn(move || blocked.recv().unwrap_or_default());
        assert!(!wait(&stuck, Duration::from_millis(1), || {}));
        drop(unblock);
        assert!(wait(&stuck, Duration::MAX, || {}));
    }

    #[test]
    fn no_unfinished_copy_stays_if_the_compression_of_an_earlier_part_is_stuck() {
        let folder = std::env::temp_dir().join(format!("memtrace-stuck-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let mut pending = PendingParts::default();
        let (unblock, blocked) = std::sync::mpsc::channel::<()>();
        let mut blocked = Some(blocked);
        let mut earlier: Option<JoinHandle<()>> = None;
        // The thread of part 1 has ended, that of part 2 is stuck, and that of part 3 waits for it.
        for number in 1..=3 {
            let part = folder.join(format!("h.r0.1.part{number}.csv"));
            fs::write(&part, lines(0, 100)).unwrap();
            let part = pending.add(part);
            let stuck = if number == 2 { blocked.take() } else { None };
            let before = earlier.take();
            let thread = std::thread::spawn(move || {
                let copy = PartCopy::new(&part, Compression::Zst, LEVEL).unwrap();
                let _ = before.map(JoinHandle::join);
                let _ = stuck.map(|stuck| stuck.recv());
                // The copy of an abandoned part has no file any more.
                assert_eq!(copy.finish().is_ok(), number == 1);
            });
            if number == 1 {
                thread.join().unwrap();
            } else {
                while !files::unfinished_copy(&folder.join(format!("h.r0.1.part{number}.csv"))).exists() {
                    std::thread::yield_now();
                }
                earlier = Some(thread);
            }
        }
        let names = |parts: Vec<Arc<PathBuf>>| -> Vec<String> {
            parts.iter().map(|part| part.file_name().unwrap().to_str().unwrap().to_owned()).collect()
        };
        assert_eq!(names(pending.abandon()), ["h.r0.1.part2.csv", "h.r0.1.part3.csv"]);
        drop(unblock);
        earlier.unwrap().join().unwrap();
        let mut left: Vec<String> = fs::read_dir(&folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["h.r0.1.part1.csv.zst", "h.r0.1.part2.csv", "h.r0.1.part3.csv"]);
        assert!(pending.abandon().is_empty());
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn compress_follows_a_part_as_it_grows_and_the_copy_is_the_whole_part() {
        let folder = std::env::temp_dir().join(format!("memtrace-compress-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let part = folder.join("h.r0.1.csv");
        for how in [Compression::Gz, Compression::Zst] {
            for steps in [0, 1, 3] {
                let mut all = Vec::new();
                fs::write(&part, "").unwrap();
                let mut copy = (steps > 0).then(|| PartCopy::new(&part, how, LEVEL).unwrap());
                for step in 0..steps.max(1) {
                    all.extend(lines(step * 20_000, (step + 1) * 20_000));
                    fs::write(&part, &all).unwrap();
                    if let Some(copy) = copy.as_mut() {
                        copy.add(all.len() as u64).unwrap();
                        assert!(part.exists() && !files::compressed(&part, how).exists());
                    }
                }
                all.extend(lines(1_000_000, 1_000_100));
                fs::write(&part, &all).unwrap();
                compress(&part, how, copy).unwrap();
                let whole = files::compressed(&part, how);
                assert!(read(&whole, how) == all, "{how:?} in {steps} steps");
                assert!(!part.exists() && !files::unfinished_copy(&part).exists());
                fs::remove_file(whole).unwrap();
            }
        }
        // Setup: a copy is dropped before it is complete -> the copy is removed, and the part remains.
        fs::write(&part, lines(0, 1000)).unwrap();
        let mut copy = PartCopy::new(&part, Compression::Zst, LEVEL).unwrap();
        copy.add(100).unwrap();
        assert!(files::unfinished_copy(&part).exists());
        drop(copy);
        assert!(part.exists() && !files::unfinished_copy(&part).exists());
        // Setup: most of a part is not compressed yet when the part ends -> the whole part is compressed
        // again at the fast level.
        let many = lines(0, 1_200_000);
        fs::write(&part, &many).unwrap();
        let mut copy = PartCopy::new(&part, Compression::Zst, LEVEL).unwrap();
        copy.add(PIECE).unwrap();
        assert!(many.len() as u64 > 2 * LONGEST_PIECE);
        compress(&part, Compression::Zst, Some(copy)).unwrap();
        assert!(read(&files::compressed(&part, Compression::Zst), Compression::Zst) == many);
        fs::remove_dir_all(&folder).unwrap();
    }
}
