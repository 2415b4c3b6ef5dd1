//! MemTracker's order of module paths: layer 9 before layer 10.

/// A piece of a path as MemTracker sorts it: digits as numbers, other text in lower case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Piece {
    Text(String),
    Number(u128),
}

/// Splits a path as Python's `re.split("([0-9]+)", path)` does: texts and numbers alternate, starting with a
/// text.
pub(super) fn natural(path: &str) -> Vec<Piece> {
    let mut pieces = vec![Piece::Text(String::new())];
    for c in path.chars() {
        let digit = c.to_digit(10).filter(|_| c.is_ascii_digit());
        match (pieces.last_mut(), digit) {
            (Some(Piece::Number(number)), Some(digit)) => {
                *number = number.saturating_mul(10).saturating_add(u128::from(digit));
            }
            (_, Some(digit)) => pieces.push(Piece::Number(u128::from(digit))),
            (Some(Piece::Text(text)), None) => text.extend(c.to_lowercase()),
            (_, None) => pieces.push(Piece::Text(c.to_lowercase().collect())),
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::natural;

    #[test]
    fn modules_sort_layers_by_their_number() {
        let mut paths = ["GPT.h.10", "GPT.h.9", "GPT", "gpt.A", "GPT.h.9.mlp"];
        paths.sort_by_key(|path| natural(path));
        assert_eq!(paths, ["GPT", "gpt.A", "GPT.h.9", "GPT.h.9.mlp", "GPT.h.10"]);
    }
}
