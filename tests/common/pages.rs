//! Blocks of output in the documentation, for tests that compare them with the output of their commands.

use super::command::root;

/// Returns the arguments of the first command of memtrace in a page's first console block, and its output as shown.
pub(crate) fn first_command(page: &str) -> (Vec<String>, String) {
    commands(page).swap_remove(0)
}

/// Returns the arguments of memtrace and the output as shown of each console block of a page.
pub(crate) fn commands(page: &str) -> Vec<(Vec<String>, String)> {
    let blocks = blocks(page, "```console\n$ memtrace ");
    let parts = blocks.iter().map(|block| block.split_once('\n').unwrap());
    parts
        .map(|(command, shown)| (command.split_whitespace().map(str::to_owned).collect(), shown.to_owned()))
        .collect()
}

/// Returns the part of a page between `opening` and the next three backticks.
pub(crate) fn first_block(page: &str, opening: &str) -> String {
    blocks(page, opening).swap_remove(0)
}

/// Returns each part of a page between `opening` and the next three backticks.
fn blocks(page: &str, opening: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(page)).unwrap();
    text.split(opening).skip(1).map(|block| block.split("```").next().unwrap().to_owned()).collect()
}

/// Checks that each line of a page is a line of `printed`, in this order. The page may omit lines, and `...` marks a line
/// that it cuts. Lines are compared after `comparable`, such as without the widths of columns.
pub(crate) fn assert_shown(shown: &str, printed: &str, comparable: impl Fn(&str) -> String) {
    let mut rest = printed.lines().map(&comparable);
    for line in shown.lines().map(&comparable).filter(|line| !line.is_empty()) {
        let is_line = |own: String| match line.strip_suffix("...") {
            Some(start) => own.starts_with(start.trim_end()),
            None => own == line,
        };
        assert!(rest.any(is_line), "the page shows {line:?}, which was not printed:\n{printed}");
    }
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
