//! Searches in byte strings, such as the mangled names of kernels.

/// Returns the offset of the first occurrence of `part`.
pub(crate) fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    // SAFETY: both slices are valid for their length, and `memmem` reads no further. It is the fastest
    // available search: tens of thousands of names are searched while PyTorch loads.
    let found = unsafe { libc::memmem(text.as_ptr().cast(), text.len(), part.as_ptr().cast(), part.len()) };
    (!found.is_null()).then(|| found as usize - text.as_ptr() as usize)
}

/// Returns true if `part` occurs in the text.
pub(crate) fn contains(text: &[u8], part: &[u8]) -> bool {
    find(text, part).is_some()
}

/// Returns the text after the first occurrence of `part`.
pub(crate) fn after<'a>(text: &'a [u8], part: &[u8]) -> Option<&'a [u8]> {
    find(text, part).map(|at| &text[at + part.len()..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_occurrence_counts() {
        assert_eq!((find(b"abcabc", b"bc"), find(b"abc", b"cd"), find(b"", b"a")), (Some(1), None, None));
        assert_eq!((after(b"abcabc", b"bc"), after(b"abc", b"bc")), (Some(&b"abc"[..]), Some(&b""[..])));
        assert!(contains(b"abc", b"abc") && !contains(b"ab", b"abc"));
    }
}
