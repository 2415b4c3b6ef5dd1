//! The codes that solvers leave in device memory. A code is 0 if the matrix could be factored or solved.
//!
//! PyTorch reads the codes after each call (`at::native::_linalg_check_errors`). If no call wrote a code, the
//! phantom would have to invent the value, and a loop over small systems reads thousands of codes.

use crate::core::const_text::{contains, ends_with, starts_with};
use crate::core::stream::Stream;
use crate::cuda::copy::{Known, device_of, write_computed};
use crate::libs::library_calls::RawArguments;

/// The position of the codes among the arguments of a call, counted from 0 (cusolverDn.h, cublas_api.h).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SolverCodes {
    address: usize,
    /// The position of the argument with the number of codes, or `None` if there is one code.
    count: Option<usize>,
}

/// The positions of the codes, by a part of the function's name. The first entry whose part occurs in the
/// name counts, so a longer part precedes the shorter one that it contains.
const CUSOLVER: [(&str, SolverCodes); 28] = [
    ("XsyevBatched", many(15, 16)),
    ("Xsyevd", one(15)),
    ("Xpotrf", one(12)),
    ("Xpotrs", one(11)),
    ("Xgeqrf", one(14)),
    ("Xgeev", one(21)),
    ("Xsytrs", one(15)),
    ("potrfBatched", many(5, 6)),
    ("potrsBatched", one(8)),
    ("potrf", one(7)),
    ("potrs", one(8)),
    ("getrf", one(7)),
    ("getrs", one(9)),
    ("geqrf", one(8)),
    ("orgqr", one(9)),
    ("ungqr", one(9)),
    ("ormqr", one(13)),
    ("unmqr", one(13)),
    ("sytrf", one(8)),
    ("gesvdaStridedBatched", many(18, 20)),
    ("gesvdjBatched", many(13, 15)),
    ("gesvdj", one(14)),
    ("gesvd", one(15)),
    ("evjBatched", many(9, 11)),
    ("syevj", one(9)),
    ("heevj", one(9)),
    ("syevd", one(9)),
    ("heevd", one(9)),
];
const CUBLAS: [(&str, SolverCodes); 6] = [
    ("getrfBatched", many(5, 6)),
    ("getriBatched", many(7, 8)),
    ("matinvBatched", many(6, 7)),
    ("gelsBatched", many(10, 11)),
    // For the next two functions, NVIDIA also documents a single code in host memory, for invalid arguments.
    ("getrsBatched", many(9, 10)),
    ("geqrfBatched", many(6, 7)),
];

const fn one(address: usize) -> SolverCodes {
    SolverCodes { address, count: None }
}

const fn many(address: usize, count: usize) -> SolverCodes {
    SolverCodes { address, count: Some(count) }
}

/// An upper bound for the number of systems in one call. A larger word is not a count.
const MOST: usize = 1 << 20;

impl SolverCodes {
    /// Returns the position of the codes of the call with this name, or `None` if it leaves none.
    pub(crate) const fn from_name(name: &str) -> Option<Self> {
        let table: &[(&str, SolverCodes)] = if ends_with(name, "bufferSize") {
            &[]
        } else if starts_with(name, "cusolverDn") {
            &CUSOLVER
        } else if starts_with(name, "cublas") {
            &CUBLAS
        } else {
            &[]
        };
        let mut row = 0;
        while row < table.len() {
            if contains(name, table[row].0) {
                return Some(table[row].1);
            }
            row += 1;
        }
        None
    }

    /// Returns the position of the last argument that a call of this kind has. In some calls, one more word
    /// with parameters follows the codes, so the position may be one too high.
    pub(crate) fn last_argument(self) -> usize {
        self.count.unwrap_or(self.address + 1)
    }

    /// Writes the code of success. A captured call writes no code, and the launch of its
    /// graph makes the codes unknown.
    pub(crate) fn succeed(self, arguments: &RawArguments, stream: &Stream) {
        if stream.capturing().is_some() {
            return;
        }
        let address = arguments.word(self.address);
        // The upper half of a register that holds an `int` is undefined.
        let count = self.count.map_or(1, |place| arguments.word(place) as u32 as usize);
        if count <= MOST && device_of(address).is_some() {
            let codes = Known { bytes: vec![0; 4 * count], is_answer: false };
            // SAFETY: the address is device memory. `write_computed` refuses a range that is not mapped
            // completely.
            unsafe { write_computed(address, &codes) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn solvers_are_known_by_their_names() {
        for (name, codes) in [
            ("cusolverDnSpotrf", Some(one(7))),
            ("cusolverDnZpotrfBatched", Some(many(5, 6))),
            ("cusolverDnXpotrf", Some(one(12))),
            ("cusolverDnXsyevBatched", Some(many(15, 16))),
            ("cusolverDnCheevjBatched", Some(many(9, 11))),
            ("cusolverDnDgesvdj", Some(one(14))),
            ("cusolverDnSgesvdaStridedBatched", Some(many(18, 20))),
            ("cublasSgetrfBatched", Some(many(5, 6))),
            ("cublasDgelsBatched", Some(many(10, 11))),
            ("cusolverDnSpotrf_bufferSize", None),
            ("cublasSgemm_v2", None),
        ] {
            assert_eq!(SolverCodes::from_name(name), codes, "{name}");
        }
    }
}
