//! Values of memory snapshots in pickle format, for tests.

/// A value in pickle format.
pub type Pickled = Vec<u8>;
/// The fields of a dictionary, in order.
pub type Fields = Vec<(&'static str, Pickled)>;

/// Returns a text.
#[must_use]
pub fn text(text: &str) -> Pickled {
    [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}

/// Returns an integer.
#[must_use]
pub fn int(number: i64) -> Pickled {
    [&[0x8A, 8][..], &number.to_le_bytes()].concat()
}

/// Returns a list, which adds at most 1,000 values at a time.
#[must_use]
pub fn list(values: &[Pickled]) -> Pickled {
    let parts = values.chunks(1000).flat_map(|part| [&b"("[..], &part.concat(), b"e"].concat());
    [b"]".to_vec(), parts.collect()].concat()
}

/// Returns a dictionary.
#[must_use]
pub fn dict(fields: &Fields) -> Pickled {
    let items = fields.iter().flat_map(|(key, value)| [text(key), value.clone()]);
    [b"}(".to_vec(), items.collect::<Vec<_>>().concat(), b"u".to_vec()].concat()
}

/// Returns the fields with another value of `key`.
#[must_use]
pub fn with(mut fields: Fields, key: &'static str, value: Pickled) -> Fields {
    fields.retain(|(name, _)| *name != key);
    fields.push((key, value));
    fields
}

/// Returns a frame of a stack.
#[must_use]
pub fn frame(name: &str, file: &str, line: i64) -> Fields {
    vec![("name", text(name)), ("filename", text(file)), ("line", int(line))]
}

/// Returns an event of the allocator.
#[must_use]
pub fn event(action: &str, addr: i64, bytes: i64, time_us: i64) -> Fields {
    let addr_key = if action == "oom" { "device_free" } else { "addr" };
    vec![
        ("action", text(action)),
        (addr_key, int(addr)),
        ("size", int(bytes)),
        ("stream", int(0)),
        ("time_us", int(time_us)),
        ("frames", list(&[dict(&frame("f", "a.py", 7))])),
    ]
}

/// Returns a block.
#[must_use]
pub fn block(addr: i64, bytes: i64, state: &str) -> Fields {
    vec![
        ("address", int(addr)),
        ("size", int(bytes)),
        ("requested_size", int(bytes)),
        ("state", text(state)),
        ("frames", list(&[])),
    ]
}

/// Returns a segment.
#[must_use]
pub fn segment(addr: i64, bytes: i64, blocks: &[Fields]) -> Fields {
    vec![
        ("device", int(0)),
        ("address", int(addr)),
        ("total_size", int(bytes)),
        ("stream", int(0)),
        ("segment_pool_id", [int(0), int(0), vec![0x86]].concat()),
        ("is_expandable", vec![0x89]),
        ("frames", list(&[])),
        ("blocks", list(&blocks.iter().map(dict).collect::<Vec<_>>())),
    ]
}
