//! Conversion between events and bytes: the slots after a definition contain a text, and recovery reads a
//! journal as bytes.

use super::{Event, Payload};
use crate::context::TextId;

/// Returns the definition of a text, followed by slots with the bytes of the text.
#[must_use]
pub fn text_events(id: TextId, text: &str) -> Vec<Event> {
    let mut events = vec![Payload::DefineText { id, length: text.len() }.define()];
    events.extend(text.as_bytes().chunks(size_of::<Event>()).map(event_of));
    events
}

/// Returns the number of events that [`text_events`] returns for a text.
#[must_use]
pub fn text_events_len(text: &str) -> usize {
    1 + text.len().div_ceil(size_of::<Event>())
}

/// Returns the event with these bytes: up to 64, from a text or a journal. Missing bytes are 0.
#[must_use]
pub fn event_of(bytes: &[u8]) -> Event {
    let mut word = [0u64; 8];
    for (word, bytes) in word.iter_mut().zip(bytes.chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_le_bytes(whole);
    }
    let [clock_ns, head, addr, size, allocated, reserved, tail, extra] = word;
    let head = head.to_le_bytes();
    let tail = tail.to_le_bytes();
    Event {
        clock_ns,
        kind: head[0],
        api: head[1],
        device: head[2] as i8,
        flags: head[3],
        status: i16::from_le_bytes([head[4], head[5]]),
        pool: u16::from_le_bytes([head[6], head[7]]),
        addr,
        size: size as i64,
        allocated,
        reserved,
        context: u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]),
        step: i32::from_le_bytes([tail[4], tail[5], tail[6], tail[7]]),
        extra: extra as i64,
    }
}

/// Returns the bytes of an event, the inverse of [`event_of`].
#[must_use]
pub fn bytes_of(slot: &Event) -> [u8; 64] {
    let mut bytes = [0; 64];
    let [s0, s1] = slot.status.to_le_bytes();
    let [o0, o1] = slot.pool.to_le_bytes();
    bytes[0..8].copy_from_slice(&slot.clock_ns.to_le_bytes());
    bytes[8..16].copy_from_slice(&[slot.kind, slot.api, slot.device as u8, slot.flags, s0, s1, o0, o1]);
    bytes[16..24].copy_from_slice(&slot.addr.to_le_bytes());
    bytes[24..32].copy_from_slice(&slot.size.to_le_bytes());
    bytes[32..40].copy_from_slice(&slot.allocated.to_le_bytes());
    bytes[40..48].copy_from_slice(&slot.reserved.to_le_bytes());
    bytes[48..52].copy_from_slice(&slot.context.to_le_bytes());
    bytes[52..56].copy_from_slice(&slot.step.to_le_bytes());
    bytes[56..64].copy_from_slice(&slot.extra.to_le_bytes());
    bytes
}

/// Returns how many of the slots after `event` contain its text. 0 if the event does not define a text.
#[must_use]
pub fn text_slots(event: &Event) -> usize {
    match event.unpack() {
        Some((_, Payload::DefineText { length, .. })) => length.div_ceil(size_of::<Event>()),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_comes_back_from_its_slots() {
        let text = "GPT.h.11.mlp.".repeat(9);
        let events = text_events(3, &text);
        assert_eq!(events.len(), 1 + text.len().div_ceil(64));
        assert_eq!(events.len(), text_events_len(&text));
        let bytes: Vec<u8> = events[1..].iter().flat_map(bytes_of).collect();
        assert_eq!(&bytes[..text.len()], text.as_bytes());
    }
}
