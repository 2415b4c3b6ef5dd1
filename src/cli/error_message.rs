//! Formats an error as one line for the user.

/// Returns the error and its causes in one line. A cause that an error's text already contains is not
/// repeated.
pub(crate) fn message(error: &anyhow::Error) -> String {
    let mut message = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if message.is_empty() {
            message = cause;
        } else if !message.ends_with(&cause) {
            message = format!("{message}: {cause}");
        }
    }
    message
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn an_error_message_names_each_cause_once() {
        let cause = std::io::Error::other("the disk is full");
        let path = "out.csv".into();
        let error: anyhow::Error = memtrace_trace::Error::Io { path, source: cause }.into();
        assert_eq!(message(&error), "out.csv: the disk is full");
        let error = Err::<(), _>(error).context("cannot write").unwrap_err();
        assert_eq!(message(&error), "cannot write: out.csv: the disk is full");
    }
}
