//! The text about a communicator of NCCL: the column `name` of the rows of its memory
//! (`communicator 2: rank 0 of 8`), and the mark that names its group
//! (`communicator 2: mesh_tp, 8 ranks, 8 on this node`).

const PREFIX: &str = "communicator ";

/// Returns the text about the communicator with this number in the process.
#[must_use]
pub fn communicator_text(number: u32, about: &str) -> String {
    format!("{PREFIX}{number}: {about}")
}

/// Splits a text into the number of a communicator and what it says about it. Returns `None` for another text.
#[must_use]
pub fn parse_communicator(text: &str) -> Option<(u32, &str)> {
    let (number, about) = text.strip_prefix(PREFIX)?.split_once(": ")?;
    Some((number.parse().ok()?, about))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_about_a_communicator_is_parsed() {
        let text = communicator_text(2, "mesh_tp: 8 ranks");
        assert_eq!(text, "communicator 2: mesh_tp: 8 ranks");
        assert_eq!(parse_communicator(&text), Some((2, "mesh_tp: 8 ranks")));
        for text in ["communicator x: y", "communicator 4294967296: a", "communicator 2", "epoch 2", ""] {
            assert_eq!(parse_communicator(text), None, "{text}");
        }
    }
}
