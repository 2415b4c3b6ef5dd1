//! The texts of text columns: the placeholders, and the form that a text must have in the file.

/// The placeholder of a text column without a text.
pub const NONE: &str = "(none)";
/// The name in reports of the blocks without a category.
pub const NO_CATEGORY: &str = "(no category)";
/// The name in reports of the blocks without a module.
pub const NO_MODULE: &str = "(no module)";
/// The name in reports of the blocks without an op.
pub const NO_OP: &str = "(no op)";
/// The name in reports of the blocks without a phase.
pub const NO_PHASE: &str = "(no phase)";
/// The name in reports of the blocks without a line of Python.
pub const NO_LINE: &str = "(no line)";
/// The name in reports of the blocks without a stack.
pub const NO_STACK: &str = "(no stack)";
/// The name in reports of the blocks with neither op nor module nor category.
pub const NO_OWNER: &str = "(no owner)";

/// The module of an op that runs outside every module.
pub const SCRIPT: &str = "(script)";

/// The longest text of a column, in bytes; longer ones are cut.
pub const MAX_TEXT: usize = 4096;

/// The texts that pandas reads as a missing value (`pandas._libs.parsers.STR_NA_VALUES`).
const MISSING: &[&str] = &[
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A",
    "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
];

/// A text in the form that the file allows: cut to [`MAX_TEXT`], on one line, and in quotes when a loader would read it
/// as a missing value, a number or a truth value.
#[must_use]
pub fn safe_text(text: &str) -> String {
    let mut end = text.len().min(MAX_TEXT);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let line: String = text[..end].chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let bare = line.trim();
    if bare.is_empty() {
        return NONE.to_owned();
    }
    let misread = MISSING.contains(&bare)
        || bare.parse::<f64>().is_ok()
        || bare.eq_ignore_ascii_case("true")
        || bare.eq_ignore_ascii_case("false");
    if misread { format!("'{bare}'") } else { bare.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_can_be_misread_by_a_loader() {
        assert_eq!(safe_text("NA"), "'NA'");
        assert_eq!(safe_text(" 12 "), "'12'");
        assert_eq!(safe_text("1e5"), "'1e5'");
        assert_eq!(safe_text("inf"), "'inf'");
        assert_eq!(safe_text("True"), "'True'");
        assert_eq!(safe_text("\n"), NONE);
        assert_eq!(safe_text("a\nb"), "a b");
        assert_eq!(safe_text("GPT.h.0"), "GPT.h.0");
        assert!(safe_text(&"é".repeat(5000)).len() <= MAX_TEXT);
    }
}
