//! Texts: the placeholders, and the conversion of texts for the file and for the screen.

use std::borrow::Cow;
use std::fmt::Write as _;

/// The placeholder in a text column without a text.
pub const NONE: &str = "(none)";
/// The placeholder in the columns `dtype` and `shape`, shorter than [`NONE`] because most rows have it.
pub const UNKNOWN: &str = "?";
/// The name of blocks without a category in reports.
pub const NO_CATEGORY: &str = "(no category)";
/// The name of blocks without a module in reports.
pub const NO_MODULE: &str = "(no module)";
/// The name of blocks without an op in reports.
pub const NO_OP: &str = "(no op)";
/// The name of blocks without a phase in reports.
pub const NO_PHASE: &str = "(no phase)";
/// The name of blocks without a Python line in reports.
pub const NO_LINE: &str = "(no line)";
/// The name of blocks without a stack in reports.
pub const NO_STACK: &str = "(no stack)";
/// The owner in reports of memory that has no op, no module and no phase.
pub const NO_OWNER: &str = "(no owner)";

/// The column `source` in the rows of PyTorch's caching allocator: the library that contains it.
pub const TORCH_ALLOCATOR: &str = "libc10_cuda.so";

/// The module of an op that runs outside every module.
pub const SCRIPT: &str = "(script)";

/// The phase of memory into which data is loaded: Python code allocates it outside every op, before the first
/// forward or outside every phase.
pub const LOAD: &str = "load";

/// The op and the module of memory that was allocated outside the detailed steps.
pub const WITHOUT_DETAIL: &str = "(without detail)";

/// The maximum length of a text in a column, in bytes. Longer texts are cut.
pub const MAX_TEXT: usize = 4096;

/// The texts that pandas reads as missing values (`pandas._libs.parsers.STR_NA_VALUES`).
const MISSING: &[&str] = &[
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A",
    "NA", "NULL", "NaN", "None", "n/a", "nan", "null",
];

/// The characters that start a formula in a spreadsheet, in their regular and full-width forms.
const FORMULA: &[char] = &['=', '+', '-', '@', '＝', '＋', '－', '＠'];

/// Returns a text as one word of a shell's command line, such as the path of a trace in a command to paste.
#[must_use]
pub fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+=:,@%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) { text.to_owned() } else { shell_quoted(text) }
}

/// Returns a text in quotes, as one word of a shell's command line.
#[must_use]
pub fn shell_quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Returns a text in the form that the file allows: cut to [`MAX_TEXT`] and on one line. It is put in quotes
/// if a loader would read it as a missing value, a number or a truth value. It is preceded by a quote if a
/// spreadsheet would read it as a formula; [`original_text`] removes that quote.
#[must_use]
pub fn safe_text(text: &str) -> String {
    let line: String = cut(text, MAX_TEXT).chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let bare = line.trim();
    if bare.is_empty() {
        return NONE.to_owned();
    }
    if is_formula(bare) {
        // With the quote before it, the text is neither a number nor a missing value.
        return format!("'{bare}");
    }
    let misread = MISSING.contains(&bare)
        || bare.parse::<f64>().is_ok()
        || bare.eq_ignore_ascii_case("true")
        || bare.eq_ignore_ascii_case("false");
    if misread { format!("'{bare}'") } else { bare.to_owned() }
}

/// Removes the quote that [`safe_text`] added to hide a text from spreadsheets. Other texts are unchanged.
#[must_use]
pub fn original_text(text: &str) -> &str {
    text.strip_prefix('\'').filter(|rest| is_formula(rest)).unwrap_or(text)
}

/// Returns true if a spreadsheet reads the text as a formula, or would do so without the quotes before it.
fn is_formula(text: &str) -> bool {
    text.trim_start_matches('\'').starts_with(FORMULA)
}

/// Returns a text of unknown origin in a form that is safe for a terminal: cut to [`MAX_TEXT`], with control
/// characters and characters that change the text direction escaped (`\u{1b}`).
#[must_use]
pub fn printable(text: &str) -> Cow<'_, str> {
    let short = cut(text, MAX_TEXT);
    if short.len() == text.len() && !text.contains(is_unprintable) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(short.len() + 16);
    for char in short.chars() {
        if is_unprintable(char) {
            // Writing to a String cannot fail.
            let _ = write!(shown, "{}", char.escape_default());
        } else {
            shown.push(char);
        }
    }
    if short.len() < text.len() {
        let _ = write!(shown, "… ({} bytes in all)", text.len());
    }
    Cow::Owned(shown)
}

/// Same as [`printable`], for a text of several lines.
#[must_use]
pub fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

/// Returns the text of a JSON document in which the characters that [`printable`] escapes are JSON escapes
/// (`\u009b`). JSON itself requires this only below U+0020.
#[must_use]
pub fn printable_json(json: &str) -> Cow<'_, str> {
    let is_raw = |char: char| is_unprintable(char) && char != '\n';
    if !json.contains(is_raw) {
        return Cow::Borrowed(json);
    }
    let mut shown = String::with_capacity(json.len() + 16);
    for char in json.chars() {
        if is_raw(char) {
            let _ = write!(shown, "\\u{:04x}", u32::from(char));
        } else {
            shown.push(char);
        }
    }
    Cow::Owned(shown)
}

/// Returns true for a control character other than a tab, and for a character that changes the text
/// direction, ends a line, or is invisible.
fn is_unprintable(char: char) -> bool {
    (char.is_control() && char != '\t')
        || matches!(char, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// Returns the start of a text: at most `most` bytes, in whole characters.
#[must_use]
pub fn cut(text: &str, most: usize) -> &str {
    let mut end = text.len().min(most);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
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

    #[test]
    fn no_text_is_a_formula_of_a_spreadsheet_and_none_is_changed() {
        let formulas = [
            "=cmd|' /C calc'!A0",
            "+1",
            "-1",
            "-nan",
            "-inf",
            "@SUM(A1)",
            "＝1",
            "'=1",
            "''+x",
            "'-1'",
            "'@'",
            "-",
            "=",
        ];
        for text in formulas {
            let safe = safe_text(text);
            assert_eq!(safe, format!("'{text}"));
            assert_eq!(original_text(&safe), text);
            assert!(!MISSING.contains(&&*safe) && safe.parse::<f64>().is_err());
        }
        assert_eq!(safe_text("\t=1"), "'=1");
        assert_eq!(safe_text("\r@x"), "'@x");
        for text in ["a=b", "'NA'", "'a'", "'", "GPT.h.0", NONE, SCRIPT, "'12'", "{\"a\":-1}"] {
            assert_eq!(safe_text(text), text);
            assert_eq!(original_text(text), text);
        }
    }

    #[test]
    fn a_terminal_gets_no_control_sequence_and_no_endless_text() {
        assert!(matches!(printable("GPT.h.0 é 日本 ▊"), Cow::Borrowed(_)));
        assert_eq!(printable("\x1b]0;title\x07"), "\\u{1b}]0;title\\u{7}");
        assert_eq!(printable("a\r\n\tb\u{9b}31m"), "a\\r\\n\tb\\u{9b}31m");
        assert_eq!(printable("\u{202e}gpj.exe"), "\\u{202e}gpj.exe");
        let long = "x".repeat(2_000_000);
        assert!(printable(&long).ends_with("x… (2000000 bytes in all)"));
        assert!(printable(&long).len() < 5000);
        assert_eq!(printable_lines("a\nb\x1b"), "a\nb\\u{1b}");
        assert_eq!(printable_json("{\n \"a\": \"\u{9b}é\"\n}"), "{\n \"a\": \"\\u009bé\"\n}");
    }
}
