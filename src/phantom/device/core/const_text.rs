//! Text functions for the names of calls, evaluated at compile time. `str`'s own methods are not `const`.

/// Returns true if a text begins with another.
pub(crate) const fn starts_with(text: &str, start: &str) -> bool {
    matches_at(text, start, 0)
}

/// Returns true if a text ends with another.
pub(crate) const fn ends_with(text: &str, end: &str) -> bool {
    text.len() >= end.len() && matches_at(text, end, text.len() - end.len())
}

/// Returns true if a text contains another.
pub(crate) const fn contains(text: &str, part: &str) -> bool {
    let mut at = 0;
    while at + part.len() <= text.len() {
        if matches_at(text, part, at) {
            return true;
        }
        at += 1;
    }
    false
}

/// Returns true if a text is one of a list.
pub(crate) const fn is_in(text: &str, list: &[&str]) -> bool {
    let mut index = 0;
    while index < list.len() {
        if text.len() == list[index].len() && starts_with(text, list[index]) {
            return true;
        }
        index += 1;
    }
    false
}

const fn matches_at(text: &str, part: &str, at: usize) -> bool {
    let (text, part) = (text.as_bytes(), part.as_bytes());
    if text.len() < at + part.len() {
        return false;
    }
    let mut index = 0;
    while index < part.len() {
        if text[at + index] != part[index] {
            return false;
        }
        index += 1;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_question_has_the_answer_of_the_standard_library() {
        let texts = ["", "cu", "cuda", "cudaMalloc", "Malloc", "cudaMallocHost", "aMa", "aa"];
        for text in texts {
            for part in texts {
                assert_eq!(starts_with(text, part), text.starts_with(part), "{text} {part}");
                assert_eq!(ends_with(text, part), text.ends_with(part), "{text} {part}");
                assert_eq!(contains(text, part), text.contains(part), "{text} {part}");
                assert_eq!(is_in(text, &[part, "cuInit"]), text == part, "{text} {part}");
            }
        }
    }
}
