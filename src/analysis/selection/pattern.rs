//! Patterns of names, such as `GPT.h.*`.

/// Returns true if `name` matches `pattern`. `*` matches any characters except `level_end`, `**` matches any
/// characters, and `?` matches one character. The time is at most proportional to the product of both
/// lengths.
#[must_use]
pub fn matches(pattern: &str, name: &str, level_end: Option<char>) -> bool {
    let mut pattern = pattern.chars().peekable();
    let name: Vec<char> = name.chars().collect();
    // `reached[n]` is true if the pattern so far matches the first `n` characters of the name.
    let mut reached = vec![false; name.len() + 1];
    reached[0] = true;
    while let Some(part) = pattern.next() {
        let mut next = vec![false; name.len() + 1];
        let is_star = part == '*';
        let any_level = is_star && pattern.next_if_eq(&'*').is_some();
        for at in 0..=name.len() {
            if is_star {
                let extends = at > 0 && next[at - 1] && (any_level || Some(name[at - 1]) != level_end);
                next[at] = reached[at] || extends;
            } else {
                next[at] = at > 0 && reached[at - 1] && (part == '?' || part == name[at - 1]);
            }
        }
        reached = next;
    }
    reached[name.len()]
}
