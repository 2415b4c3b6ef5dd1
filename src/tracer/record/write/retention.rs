//! Removes old parts of a rotated trace (`MEMTRACE_KEEP`).
//!
//! After each rotation the oldest finished parts are removed until the rest is within the bound. Some parts
//! are kept longer: the first part, whose name no later process may take; the part before the current one,
//! which recovery may still complete; the parts with the highest peak of a GPU; and the parts with an OOM. If
//! only such parts are left and exceed a bound in bytes, the oldest parts with an OOM are removed. This ends
//! when the bound is met, or when the parts with an OOM take at most half of the bound. With a bound in time,
//! at most [`Keep::PARTS`] older parts with an OOM are kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use memtrace_encode::Encoder;
use memtrace_trace::config::Compression;
use memtrace_trace::files;
use memtrace_trace::keep::Keep;

/// The finished parts that are on disk.
pub(crate) struct Retention {
    keep: Keep,
    /// The parts in the order of their numbers.
    parts: Vec<FinishedPart>,
    /// The highest allocated and reserved bytes of each device, and the parts that reached them first.
    peaks: Vec<[(i64, u32); 2]>,
    /// The number of OOMs up to the last finished part.
    ooms: u64,
}

/// A part that gets no more rows.
struct FinishedPart {
    number: u32,
    path: PathBuf,
    ended: Instant,
    has_oom: bool,
}

impl FinishedPart {
    /// Returns the files that the part may have: the rows (plain, compressed or half compressed) and the
    /// stacks. The files can be removed in this order while the compressor works, because each file comes
    /// before the files that are made from it.
    fn files(&self) -> [PathBuf; 5] {
        let compressed = |how| files::compressed(&self.path, how);
        [
            self.path.clone(),
            files::unfinished_copy(&self.path),
            compressed(Compression::Gz),
            compressed(Compression::Zst),
            files::stacks(&self.path),
        ]
    }

    /// Returns the size of the files on disk in bytes.
    fn bytes(&self) -> u64 {
        let bytes = |file: &PathBuf| fs::symlink_metadata(file).map_or(0, |about| about.len());
        self.files().iter().map(bytes).fold(0, u64::saturating_add)
    }

    fn remove(&self) {
        for file in self.files() {
            // A file that cannot be removed is left; the next part has another name.
            let _ = fs::remove_file(file);
        }
    }
}

impl Retention {
    pub(crate) fn new(keep: Keep) -> Retention {
        Retention { keep, parts: Vec::new(), peaks: Vec::new(), ooms: 0 }
    }

    /// Adds a part that has just ended, and removes the parts that are not kept. Returns the paths of the
    /// removed parts. `current` is the maximum size in bytes of the part that is being written. Twice this
    /// size is kept free of the bound, because a compressed copy of the part grows at the same time.
    pub(crate) fn add(&mut self, path: &Path, number: u32, encoder: &Encoder, current: u64) -> Vec<PathBuf> {
        if self.keep == Keep::All {
            return Vec::new();
        }
        let ooms = encoder.statistics().ooms;
        let has_oom = ooms > std::mem::replace(&mut self.ooms, ooms);
        self.note_peaks(encoder.statistics().peaks(), number);
        self.parts.push(FinishedPart { number, path: path.to_owned(), ended: Instant::now(), has_oom });
        let going = match self.keep {
            Keep::All => Vec::new(),
            Keep::Bytes(most) => self.beyond_bytes(most.saturating_sub(current.saturating_mul(2))),
            Keep::Secs(most) => self.older_than(Duration::from_secs(most)),
        };
        let (going, staying) =
            std::mem::take(&mut self.parts).into_iter().partition(|part| going.contains(&part.number));
        self.parts = staying;
        let going: Vec<FinishedPart> = going;
        going.iter().for_each(FinishedPart::remove);
        going.into_iter().map(|part| part.path).collect()
    }

    /// Stores `number`, the part that has just ended, for each peak that is higher than in all earlier parts.
    /// `peaks` has the highest allocated and reserved bytes of each device so far.
    fn note_peaks(&mut self, peaks: impl Iterator<Item = [i64; 2]>, number: u32) {
        for (device, peaks) in peaks.enumerate() {
            if self.peaks.len() == device {
                self.peaks.push(Default::default());
            }
            for (highest, bytes) in self.peaks[device].iter_mut().zip(peaks) {
                if bytes > highest.0 {
                    *highest = (bytes, number);
                }
            }
        }
    }

    fn has_peak(&self, part: &FinishedPart) -> bool {
        self.peaks.iter().flatten().any(|(_, number)| *number == part.number)
    }

    /// Returns the finished parts that may be removed, oldest first. The first part, the last finished part
    /// and the parts with a peak are not among them.
    fn candidates(&self) -> impl Iterator<Item = &FinishedPart> {
        let but_last = self.parts.len().saturating_sub(1);
        self.parts[..but_last].iter().filter(|part| part.number > 1 && !self.has_peak(part))
    }

    fn beyond_bytes(&self, most: u64) -> Vec<u32> {
        let sum = |parts: &mut dyn Iterator<Item = &FinishedPart>| {
            parts.map(FinishedPart::bytes).fold(0, u64::saturating_add)
        };
        let mut bytes = sum(&mut self.parts.iter());
        let mut of_ooms = sum(&mut self.candidates().filter(|part| part.has_oom));
        let mut going = Vec::new();
        for part in self.candidates().filter(|part| !part.has_oom) {
            if bytes <= most {
                break;
            }
            bytes = bytes.saturating_sub(part.bytes());
            going.push(part.number);
        }
        for part in self.candidates().filter(|part| part.has_oom) {
            // The parts with an OOM together keep up to half of the bound, so that one large part that must
            // stay cannot push them all out.
            if bytes <= most || of_ooms <= most / 2 {
                break;
            }
            let these = part.bytes();
            (bytes, of_ooms) = (bytes.saturating_sub(these), of_ooms.saturating_sub(these));
            going.push(part.number);
        }
        going
    }

    fn older_than(&self, age: Duration) -> Vec<u32> {
        let is_old = |part: &&FinishedPart| part.ended.elapsed() > age;
        let (of_ooms, others): (Vec<_>, Vec<_>) =
            self.candidates().filter(is_old).partition(|part| part.has_oom);
        let beyond = of_ooms.len().saturating_sub(Keep::PARTS as usize);
        let going = others.iter().chain(&of_ooms[..beyond]);
        going.map(|part| part.number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::compress::compress;
    use super::*;

    /// Returns a `Retention` of `count` parts of 100 bytes, oldest first. `ooms` are the part numbers with an
    /// OOM, and `peak` is the part number with the peak (0 for no part).
    fn retention(folder: &Path, count: u32, ooms: &[u32], peak: u32) -> Retention {
        let parts = (1..=count).map(|number| {
            let path = folder.join(format!("x.part{number}.csv"));
            fs::write(&path, [b'x'; 60]).unwrap();
            fs::write(files::stacks(&path), [b'x'; 40]).unwrap();
            FinishedPart { number, path, ended: Instant::now(), has_oom: ooms.contains(&number) }
        });
        let parts = parts.collect();
        Retention { keep: Keep::All, parts, peaks: vec![[(0, 0), (1, peak)]], ooms: 0 }
    }

    #[test]
    fn the_oldest_parts_are_removed_except_the_first_the_last_and_parts_with_peaks_and_ooms() {
        let folder = tempfile::tempdir().unwrap();
        let all = retention(folder.path(), 9, &[3, 6], 4);
        assert_eq!(all.beyond_bytes(900), [0; 0]);
        assert_eq!(all.beyond_bytes(899), [2]);
        assert_eq!(all.beyond_bytes(600), [2, 5, 7]);
        // The remaining 500 bytes exceed the bound of 450. But the two parts with an OOM take less than half
        // of the bound -> they stay.
        assert_eq!(all.beyond_bytes(450), [2, 5, 7, 8]);
        assert_eq!(all.beyond_bytes(300), [2, 5, 7, 8, 3]);
        assert_eq!(all.beyond_bytes(0), [2, 5, 7, 8, 3, 6]);
        assert_eq!(all.older_than(Duration::ZERO), [2, 5, 7, 8]);
        assert_eq!(all.older_than(Duration::from_secs(3600)), [0; 0]);
        assert_eq!(retention(folder.path(), 1, &[], 0).beyond_bytes(0), [0; 0]);
    }

    #[test]
    fn parts_with_an_oom_that_are_older_than_the_time_are_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let ooms: Vec<u32> = (2..=29).collect();
        let all = retention(folder.path(), 30, &ooms, 5);
        // Part 5 has the peak, and 27 other parts with an OOM may be removed -> the newest 16 of these stay.
        assert_eq!(all.older_than(Duration::ZERO), [2, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13]);
        assert_eq!(all.older_than(Duration::from_secs(3600)), [0; 0]);
    }

    #[test]
    fn a_removed_part_does_not_come_back_from_the_compressor() {
        let folder = tempfile::tempdir().unwrap();
        for round in 0..400 {
            let part = retention(folder.path(), 1, &[], 0).parts.remove(0);
            let path = part.path.clone();
            let compressor = std::thread::spawn(move || compress(&path, Compression::Zst, None));
            // The part is removed at a different moment of the compression in each round.
            std::thread::sleep(Duration::from_micros(round * 5));
            part.remove();
            // The compressor fails if its part is gone.
            let _ = compressor.join().unwrap();
            let left: Vec<_> =
                fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path()).collect();
            assert!(left.is_empty(), "round {round}: {left:?}");
        }
    }

    #[test]
    fn all_files_of_a_part_go() {
        let folder = tempfile::tempdir().unwrap();
        let part = retention(folder.path(), 1, &[], 0).parts.remove(0);
        for file in part.files() {
            fs::write(file, "x").unwrap();
        }
        part.remove();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn the_part_that_first_reaches_the_highest_peak_has_it() {
        let mut retention = Retention::new(Keep::Secs(1));
        retention.note_peaks([[5, 8]].into_iter(), 1);
        retention.note_peaks([[5, 9], [1, 1]].into_iter(), 2);
        retention.note_peaks([[5, 9], [1, 1]].into_iter(), 3);
        assert_eq!(retention.peaks, [[(5, 1), (9, 2)], [(1, 2), (1, 2)]]);
    }
}
