//! Finds the commas and line ends of a block.

use super::cpu::Cpu;

/// The delimiters of one strip of a block, preceded by the delimiters of an unfinished line of the previous
/// strip.
#[derive(Default)]
pub(super) struct Delimiters {
    /// The offset in the block of every comma and line end. Elements from `count` on are unused.
    places: Vec<u32>,
    count: usize,
    /// For each line that ends in the strip, the index of the line's end in `places`. Elements from `ended`
    /// on are unused.
    ends: Vec<u32>,
    ended: usize,
    /// True if there may be a quote.
    pub(super) quotes: bool,
}

impl Delimiters {
    /// Starts a block.
    pub(super) fn clear(&mut self) {
        (self.count, self.ended, self.quotes) = (0, 0, false);
    }

    /// Returns the offset of every comma and line end.
    #[inline(always)]
    pub(super) fn places(&self) -> &[u32] {
        &self.places[..self.count]
    }

    /// Returns the index in [`Delimiters::places`] of the end of each line that ends in the strip.
    #[inline(always)]
    pub(super) fn lines(&self) -> &[u32] {
        &self.ends[..self.ended]
    }

    /// Drops the first `done` offsets, which belong to the lines before the `unfinished` one.
    #[inline(always)]
    pub(super) fn forget(&mut self, done: usize, unfinished: &[u8]) {
        self.places.copy_within(done..self.count, 0);
        self.count -= done;
        self.quotes = self.quotes && unfinished.contains(&b'"');
    }

    /// Adds the delimiters in `block[from..to]`, the next strip.
    #[inline(always)]
    pub(super) fn next(&mut self, cpu: impl Cpu, block: &[u8], from: usize, to: usize) {
        // Every byte may be a delimiter, and each store writes 64 elements, some of them past the last
        // delimiter.
        let most = self.count + (to - from) + 2 * 64;
        if self.places.len() < most {
            self.places.resize(most, 0);
        }
        if self.ends.len() <= to - from {
            self.ends.resize(to - from + 1, 0);
        }
        let (mut count, mut ended) = (self.count, 0);
        let ends = self.ends.as_mut_slice();
        let places = self.places.as_mut_slice();
        let (words, rest) = block[from..to].as_chunks::<64>();
        // The last bytes are padded with spaces, which are not delimiters.
        let mut last = [b' '; 64];
        last[..rest.len()].copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(&last);
        let mut base = from as u32;
        for word in words.iter().chain(last) {
            let masks = cpu.masks(word);
            let Some(places) = places[count..].first_chunk_mut::<64>() else { return };
            cpu.places(masks.delimiters, base, places);
            let end = |lines: u64| {
                let before = masks.delimiters & (lines & lines.wrapping_neg()).wrapping_sub(1);
                count as u32 + before.count_ones()
            };
            // One line ends in about every fourth word. An unconditional store is cheaper than a branch.
            let Some(place) = ends.get_mut(ended) else { return };
            *place = end(masks.lines);
            ended += usize::from(masks.lines != 0);
            let mut more = masks.lines & masks.lines.wrapping_sub(1);
            while more != 0 {
                let Some(place) = ends.get_mut(ended) else { return };
                *place = end(more);
                ended += 1;
                more &= more - 1;
            }
            self.quotes |= masks.quotes;
            count += masks.delimiters.count_ones() as usize;
            base += 64;
        }
        (self.count, self.ended) = (count, ended);
    }

    /// Adds the end of an unterminated last line.
    pub(super) fn end(&mut self, at: usize) {
        self.ends.truncate(self.ended);
        self.ends.push(self.count as u32);
        self.ended += 1;
        self.places.truncate(self.count);
        self.places.push(at as u32);
        self.count += 1;
    }
}
