//! The SIMD operations of a scan, with AVX-512, with AVX2, or portable. All unsafe code of the scanner is
//! here.

use wide::{CmpEq, i8x16};

/// The delimiters in 64 bytes, as masks with a bit for each byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Masks {
    /// Commas and line ends.
    pub(super) delimiters: u64,
    /// Line ends.
    pub(super) lines: u64,
    /// True if there is a quote.
    pub(super) quotes: bool,
}

/// An implementation of the operations. All implementations return the same results.
pub(super) trait Cpu: Copy {
    /// Returns the masks of 64 bytes.
    fn masks(self, bytes: &[u8; 64]) -> Masks;

    /// Writes the positions of the set bits of `mask` to the first elements of `places`, each plus `base`.
    /// The remaining elements are unspecified.
    fn places(self, mask: u64, base: u32, places: &mut [u32; 64]);

    /// Returns the decimal number in the last `count` (1 to 16) of sixteen bytes, or `None` if one of these
    /// bytes is not a digit.
    fn digits(self, bytes: &[u8; 16], count: usize) -> Option<i64>;
}

/// Code that is compiled once for each implementation of [`Cpu`], so that it can use the processor's
/// instructions.
pub(super) trait Work {
    /// Does the work. An implementation must be `#[inline(always)]`, so that it is compiled with the features
    /// of each [`Cpu`].
    fn on(self, cpu: impl Cpu);
}

/// Does `work` with the best implementation for this processor.
pub(super) fn run(work: impl Work) {
    #[cfg(target_arch = "x86_64")]
    if let Some(cpu) = x86::Avx512::here() {
        return cpu.run(work);
    } else if let Some(cpu) = x86::Avx2::here() {
        return cpu.run(work);
    }
    work.on(Plain);
}

/// The portable implementation.
#[derive(Clone, Copy)]
pub(super) struct Plain;

impl Cpu for Plain {
    #[inline(always)]
    fn masks(self, bytes: &[u8; 64]) -> Masks {
        let (mut commas, mut lines, mut quotes) = (0, 0, i8x16::ZERO);
        for (index, part) in bytes.as_chunks::<16>().0.iter().enumerate() {
            let word = i8x16::new(part.map(u8::cast_signed));
            let equal = |byte: u8| word.cmp_eq(i8x16::splat(byte.cast_signed()));
            let mask = |found: i8x16| u64::from(found.move_mask().cast_unsigned()) << (index * 16);
            commas |= mask(equal(b','));
            lines |= mask(equal(b'\n'));
            quotes |= equal(b'"');
        }
        Masks { delimiters: commas | lines, lines, quotes: quotes.any() }
    }

    #[inline(always)]
    fn places(self, mask: u64, base: u32, places: &mut [u32; 64]) {
        one_by_one(mask, places, |bits| base + bits.trailing_zeros());
    }

    #[inline(always)]
    fn digits(self, bytes: &[u8; 16], count: usize) -> Option<i64> {
        let (high, low) = bytes.split_at(8);
        let (high, low) = (*high.first_chunk::<8>()?, *low.first_chunk::<8>()?);
        if count <= 8 {
            return eight_digits(last_of(low, count));
        }
        Some(eight_digits(last_of(high, count - 8))? * 100_000_000 + eight_digits(u64::from_le_bytes(low))?)
    }
}

/// Writes the position of each bit of the mask. `first` returns the position of the lowest bit.
#[inline(always)]
fn one_by_one(mut mask: u64, places: &mut [u32; 64], first: impl Fn(u64) -> u32) {
    // Write twelve positions at a time, some of them unused, because this is cheaper than a branch after
    // each.
    for some in places.chunks_mut(12) {
        for place in some {
            *place = first(mask);
            mask &= mask.wrapping_sub(1);
        }
        if mask == 0 {
            break;
        }
    }
}

/// Returns the last `count` (1 to 8) of eight bytes, with the other bytes replaced by `0`.
fn last_of(bytes: [u8; 8], count: usize) -> u64 {
    let kept = u64::MAX << (64 - 8 * count);
    u64::from_le_bytes(bytes) & kept | ZEROS & !kept
}

const ZEROS: u64 = u64::from_ne_bytes([b'0'; 8]);

/// Parses eight digits, the first one in the lowest byte. One multiplication each combines them into pairs,
/// then fours, then the number.
fn eight_digits(word: u64) -> Option<i64> {
    const HIGH: u64 = u64::from_ne_bytes([0xF0; 8]);
    const SIX: u64 = u64::from_ne_bytes([6; 8]);
    // The upper half of a digit's byte is 3. It stays 3 when six is added, unlike in the six bytes after `9`.
    if word & HIGH != ZEROS || word.wrapping_add(SIX) & HIGH != ZEROS {
        return None;
    }
    let digits = word - ZEROS;
    let pairs = digits.wrapping_mul(10).wrapping_add(digits >> 8) & 0x00FF_00FF_00FF_00FF;
    let fours = pairs.wrapping_mul(100).wrapping_add(pairs >> 16) & 0x0000_FFFF_0000_FFFF;
    let all = fours.wrapping_mul(10_000).wrapping_add(fours >> 32) & 0xFFFF_FFFF;
    Some(all.cast_signed())
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    use std::arch::asm;
    use std::arch::x86_64::*;

    use super::{Cpu, Masks, Work, one_by_one};

    /// Proof that this processor has AVX2 and the features that were introduced with it.
    #[derive(Clone, Copy)]
    pub(in crate::read::scan) struct Avx2(());

    impl Avx2 {
        /// Returns the proof if this processor has these features.
        pub(in crate::read::scan) fn here() -> Option<Avx2> {
            let has = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("bmi1")
                && is_x86_feature_detected!("bmi2")
                && is_x86_feature_detected!("lzcnt")
                && is_x86_feature_detected!("popcnt");
            has.then_some(Avx2(()))
        }

        pub(in crate::read::scan) fn run(self, work: impl Work) {
            #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
            fn compiled_for_it(cpu: Avx2, work: impl Work) {
                work.on(cpu);
            }
            // SAFETY: an `Avx2` exists only if the processor has all features of the function.
            unsafe { compiled_for_it(self, work) }
        }
    }

    /// Proof that this processor has the features of [`Avx2`], and AVX-512 with VBMI2, which packs bytes by a
    /// mask.
    #[derive(Clone, Copy)]
    pub(in crate::read::scan) struct Avx512(Avx2);

    impl Avx512 {
        /// Returns the proof if this processor has these features.
        pub(in crate::read::scan) fn here() -> Option<Avx512> {
            let has = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vbmi2");
            Avx2::here().filter(|_| has).map(Avx512)
        }

        pub(in crate::read::scan) fn run(self, work: impl Work) {
            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi2")]
            #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
            fn compiled_for_it(cpu: Avx512, work: impl Work) {
                work.on(cpu);
            }
            // SAFETY: an `Avx512` exists only if the processor has all features of the function.
            unsafe { compiled_for_it(self, work) }
        }
    }

    /// The positions 0 to 63, from which [`Cpu::places`] selects those in a mask.
    static COUNT: [u8; 64] = {
        let mut count = [0; 64];
        let mut at = 0;
        while at < 64 {
            count[at] = at as u8;
            at += 1;
        }
        count
    };

    impl Cpu for Avx512 {
        #[inline(always)]
        fn masks(self, bytes: &[u8; 64]) -> Masks {
            // SAFETY: `Avx512` proves the features. The reference covers 64 bytes, and the load needs no
            // alignment.
            unsafe {
                let bytes = _mm512_loadu_si512(bytes.as_ptr().cast());
                let equal = |byte: u8| _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(byte.cast_signed()));
                let lines = equal(b'\n');
                Masks { delimiters: equal(b',') | lines, lines, quotes: equal(b'"') != 0 }
            }
        }

        #[inline(always)]
        fn places(self, mask: u64, base: u32, places: &mut [u32; 64]) {
            // SAFETY: `Avx512` proves the features. The references cover 64 bytes and four times sixteen
            // elements, and loads and stores need no alignment.
            unsafe {
                let count = _mm512_loadu_si512(COUNT.as_ptr().cast());
                let packed = _mm512_maskz_compress_epi8(mask, count);
                let base = _mm512_set1_epi32(base.cast_signed());
                let mut put = |sixteen: usize, bytes: __m128i| {
                    let to = places.as_mut_ptr().add(16 * sixteen).cast();
                    _mm512_storeu_si512(to, _mm512_add_epi32(_mm512_cvtepu8_epi32(bytes), base));
                };
                put(0, _mm512_castsi512_si128(packed));
                if mask.count_ones() > 16 {
                    put(1, _mm512_extracti32x4_epi32::<1>(packed));
                    put(2, _mm512_extracti32x4_epi32::<2>(packed));
                    put(3, _mm512_extracti32x4_epi32::<3>(packed));
                }
            }
        }

        #[inline(always)]
        fn digits(self, bytes: &[u8; 16], count: usize) -> Option<i64> {
            self.0.digits(bytes, count)
        }
    }

    /// Sixteen zeros, then sixteen `0xFF`. The 16-byte window at index `count` is a mask of the last `count`
    /// bytes.
    static KEPT: [u8; 32] = {
        let mut kept = [0; 32];
        let mut at = 16;
        while at < 32 {
            kept[at] = 0xFF;
            at += 1;
        }
        kept
    };

    impl Cpu for Avx2 {
        #[inline(always)]
        fn masks(self, bytes: &[u8; 64]) -> Masks {
            let from = bytes.as_ptr().cast::<__m256i>();
            // SAFETY: `Avx2` proves the features. The reference covers both halves of 64 bytes, and the loads
            // need no alignment.
            unsafe {
                let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
                let equal = |half, byte: u8| _mm256_cmpeq_epi8(half, _mm256_set1_epi8(byte.cast_signed()));
                let bits = |half| u64::from(_mm256_movemask_epi8(half).cast_unsigned());
                let both = |byte| bits(equal(high, byte)) << 32 | bits(equal(low, byte));
                let quotes = _mm256_or_si256(equal(low, b'"'), equal(high, b'"'));
                let lines = both(b'\n');
                Masks {
                    delimiters: both(b',') | lines,
                    lines,
                    quotes: _mm256_testz_si256(quotes, quotes) == 0,
                }
            }
        }

        #[inline(always)]
        fn places(self, mask: u64, base: u32, places: &mut [u32; 64]) {
            one_by_one(mask, places, |bits| {
                let mut first = base + bits.trailing_zeros();
                // SAFETY: the text contains no instruction. This keeps the compiler from gathering several
                // positions in a vector, which takes longer than finding the positions.
                unsafe {
                    asm!("/* {0:e} */", inout(reg) first, options(pure, nomem, nostack, preserves_flags));
                }
                first
            });
        }

        #[inline(always)]
        fn digits(self, bytes: &[u8; 16], count: usize) -> Option<i64> {
            let kept: &[u8; 16] = KEPT.get(count..)?.first_chunk()?;
            // SAFETY: `Avx2` proves the features. Both references cover sixteen bytes, and the loads need no
            // alignment.
            unsafe {
                let kept = _mm_loadu_si128(kept.as_ptr().cast());
                let bytes = _mm_loadu_si128(bytes.as_ptr().cast());
                let digits = _mm_and_si128(_mm_sub_epi8(bytes, _mm_set1_epi8(b'0'.cast_signed())), kept);
                let too_large = _mm_subs_epu8(digits, _mm_set1_epi8(9));
                if _mm_testz_si128(too_large, too_large) == 0 {
                    return None;
                }
                // Combine the digits into pairs, then fours, then eights.
                let pairs = _mm_maddubs_epi16(digits, _mm_set1_epi16(0x010A));
                let fours = _mm_madd_epi16(pairs, _mm_set1_epi32(0x0001_0064));
                let eights = _mm_madd_epi16(_mm_packus_epi32(fours, fours), _mm_set1_epi32(0x0001_2710));
                let both = _mm_cvtsi128_si64(eights);
                Some((both & 0xFFFF_FFFF) * 100_000_000 + (both >> 32))
            }
        }
    }
}
