//! Blocks of output in the documentation, for tests that compare them with the output of their commands.

use std::path::Path;

/// Returns the arguments of the first command of memtrace in a page's first console block, and its output as shown.
pub(crate) fn first_command(page: &str) -> (Vec<String>, String) {
    let block = first_block(page, "```console\n$ memtrace ");
    let (command, output) = block.split_once('\n').unwrap();
    (command.split_whitespace().map(str::to_owned).collect(), output.to_owned())
}

/// Returns the arguments of memtrace and the output as shown of each console block of a page.
pub(crate) fn commands(page: &str) -> Vec<(Vec<String>, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    let text = std::fs::read_to_string(path).unwrap();
    let blocks = text.split("```console\n$ memtrace ").skip(1);
    let parts = blocks.map(|block| block.split("```").next().unwrap().split_once('\n').unwrap());
    parts
        .map(|(command, shown)| (command.split_whitespace().map(str::to_owned).collect(), shown.to_owned()))
        .collect()
}

/// Checks that each line of a page is a line of `printed`, in this order. The page may omit lines, and `...` marks a line
/// that it cuts. The widths of columns may differ.
pub(crate) fn assert_shown(shown: &str, printed: &str) {
    let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut rest = printed.lines().map(words);
    for line in shown.lines().map(words).filter(|line| !line.is_empty()) {
        let is_line = |own: String| match line.strip_suffix("...") {
            Some(start) => own.starts_with(start),
            None => own == line,
        };
        assert!(rest.any(is_line), "the page shows {line:?}, which was not printed:\n{printed}");
    }
}

/// Returns the part of a page between `opening` and the next three backticks.
pub(crate) fn first_block(page: &str, opening: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    let text = std::fs::read_to_string(path).unwrap();
    text.split(opening).nth(1).expect("a block").split("```").next().unwrap().to_owned()
}

/// Replaces each number by `N`, because process ids, steps and sizes differ between runs.
pub(crate) fn without_numbers(text: &str) -> String {
    let mut result = String::new();
    for letter in text.chars() {
        match letter {
            '0'..='9' if result.ends_with('N') => {}
            '0'..='9' => result.push('N'),
            _ => result.push(letter),
        }
    }
    result
}
