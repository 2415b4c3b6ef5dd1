//! Where the fields and lines of a block end.

use super::cpu::Cpu;

/// The places in a strip of a block, and of the line that began before it.
#[derive(Default)]
pub(super) struct Delimiters {
    /// Every comma and line end, from the block's start; what is behind `count` means nothing.
    places: Vec<u32>,
    count: usize,
    /// For each line that ends in the strip, the place of its end in `places`.
    /// What is behind `ended` means nothing.
    ends: Vec<u32>,
    ended: usize,
    /// There may be a quote.
    pub(super) quotes: bool,
}

impl Delimiters {
    /// Starts a block.
    pub(super) fn clear(&mut self) {
        (self.count, self.ended, self.quotes) = (0, 0, false);
    }

    /// Every comma and line end.
    #[inline(always)]
    pub(super) fn places(&self) -> &[u32] {
        &self.places[..self.count]
    }

    /// For each line that ends in the strip, the place of its end in [`Delimiters::places`].
    #[inline(always)]
    pub(super) fn lines(&self) -> &[u32] {
        &self.ends[..self.ended]
    }

    /// Forgets the first `done` places, those of the lines before the `unfinished` one.
    #[inline(always)]
    pub(super) fn forget(&mut self, done: usize, unfinished: &[u8]) {
        self.places.copy_within(done..self.count, 0);
        self.count -= done;
        self.quotes = self.quotes && unfinished.contains(&b'"');
    }

    /// Adds the places in `block[from..to]`, and tells the lines that end there.
    #[inline(always)]
    pub(super) fn next(&mut self, cpu: impl Cpu, block: &[u8], from: usize, to: usize) {
        // Room for the stops of every byte, and for what is written for nothing.
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
        // A space is none of what is looked for.
        let mut last = [b' '; 64];
        last[..rest.len()].copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(&last);
        let mut base = from as u32;
        for word in words.iter().chain(last) {
            let masks = cpu.masks(word);
            let Some(places) = places[count..].first_chunk_mut::<64>() else { return };
            cpu.places(masks.stops, base, places);
            let end = |lines: u64| {
                let before = masks.stops & (lines & lines.wrapping_neg()).wrapping_sub(1);
                count as u32 + before.count_ones()
            };
            // Mostly one ends in every fourth word: cheaper than to ask whether it does.
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
            count += masks.stops.count_ones() as usize;
            base += 64;
        }
        (self.count, self.ended) = (count, ended);
    }

    /// Ends the last line, which has no line end, with the block.
    pub(super) fn end(&mut self, at: usize) {
        self.ends.truncate(self.ended);
        self.ends.push(self.count as u32);
        self.ended += 1;
        self.places.truncate(self.count);
        self.places.push(at as u32);
        self.count += 1;
    }
}
