//! Wraps text for narrow terminals, at spaces and at the separators of paths and names. A word that fits on a
//! line is never broken.

/// Characters after which a path, a module or the name of an op may be broken.
const SEPARATORS: [char; 7] = ['.', '/', ':', '_', ',', '-', '('];

/// Returns `text` in lines of at most `width` characters.
#[must_use]
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Lines::new(width);
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        lines.word(word);
    }
    lines.finish()
}

/// Returns the pieces of a word that is longer than `width`. The word is cut after separators if possible,
/// and otherwise anywhere.
pub(super) fn pieces(word: &str, width: usize) -> Vec<String> {
    let mut pieces: Vec<String> = Vec::new();
    let mut rest: Vec<char> = word.chars().collect();
    while rest.len() > width {
        let cut = rest[..width].iter().rposition(|c| SEPARATORS.contains(c)).map_or(width, |at| at + 1);
        // A cut that leaves only a few characters on the line is worse than a cut inside a name.
        let cut = if cut * 3 < width { width } else { cut };
        pieces.push(rest.drain(..cut).collect());
    }
    pieces.push(rest.into_iter().collect());
    pieces
}

/// Lines that are filled word by word.
struct Lines {
    width: usize,
    done: Vec<String>,
    line: String,
}

impl Lines {
    fn new(width: usize) -> Lines {
        Lines { width: width.max(1), done: Vec::new(), line: String::new() }
    }

    fn word(&mut self, word: &str) {
        let (used, long) = (self.line.chars().count(), word.chars().count());
        if used > 0 && used + 1 + long > self.width {
            self.done.push(std::mem::take(&mut self.line));
        } else if used > 0 {
            self.line.push(' ');
        }
        if long <= self.width {
            self.line.push_str(word);
            return;
        }
        let mut parts = pieces(word, self.width);
        self.line = parts.pop().unwrap_or_default();
        self.done.extend(parts);
    }

    fn finish(mut self) -> Vec<String> {
        if !self.line.is_empty() || self.done.is_empty() {
            self.done.push(self.line);
        }
        self.done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_wrapped_at_spaces_and_names_at_their_separators() {
        assert_eq!(wrap("no word is broken", 8), ["no word", "is", "broken"]);
        assert_eq!(wrap("GPT.h.10.attn.qkv", 12), ["GPT.h.10.", "attn.qkv"]);
        assert_eq!(wrap("aten::_log_softmax_backward_data", 20), ["aten::_log_softmax_", "backward_data"]);
        assert_eq!(wrap("abcdefghij", 4), ["abcd", "efgh", "ij"]);
        assert_eq!(wrap("", 4), [""]);
    }
}
