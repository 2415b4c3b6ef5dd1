//! The order of events with equal clocks. The writer thread and recovery share it, so a repaired trace has its
//! rows in the order in which the process would have written them.

use super::{Block, Event, Payload};

/// The maximum number of lanes that are compared. More threads never record in the same nanosecond, but a
/// damaged journal may say so.
const MOST_COMPARED: usize = 16;

/// Returns the index of the event that comes first among several events with the same clock: the oldest events
/// of their lanes, in the order of the lanes' ids. Returns `None` if there is no event.
///
/// A block report comes first if its total before its change is not the total after the change of another
/// report on the same device. If there is no such report, the event of the first lane comes first.
pub fn first_of_tied<'a>(heads: impl Iterator<Item = (usize, &'a Event)>) -> Option<usize> {
    let mut lowest = None;
    let reports: Vec<(usize, i8, Block)> = heads
        .take(MOST_COMPARED)
        .filter_map(|(index, event)| {
            lowest = lowest.or(Some(index));
            match event.unpack()? {
                (header, Payload::Block(block)) => Some((index, header.device, block)),
                _ => None,
            }
        })
        .collect();
    let first = reports.iter().find(|(index, device, block)| {
        let before = (block.allocated as i64).wrapping_sub(block.bytes);
        !reports.iter().any(|(other, after_device, after)| {
            other != index && after_device == device && after.allocated as i64 == before
        })
    });
    first.map(|(index, ..)| *index).or(lowest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Api, Header};

    fn report(device: i8, bytes: i64, allocated: usize) -> Event {
        let block = Block {
            address: 0,
            bytes,
            allocated,
            reserved: 0,
            requested: -1,
            pool: 0,
            deferred: false,
            form: 0,
        };
        Payload::Block(block).pack(Header::new(5, Api::CachingAllocator, device))
    }

    fn first(events: &[Event]) -> Option<usize> {
        first_of_tied(events.iter().enumerate())
    }

    #[test]
    fn events_with_equal_clocks_follow_the_totals_and_then_the_lanes() {
        let mark = Payload::Mark { name: 0 }.pack(Header::new(5, Api::Memtrace, 0));
        assert_eq!(first(&[]), None);
        assert_eq!(first(&[mark, mark]), Some(0));
        // 0 -> 512 -> 1024, whichever lane has the first report.
        assert_eq!(first(&[report(0, 512, 1024), report(0, 512, 512)]), Some(1));
        assert_eq!(first(&[report(0, 512, 512), report(0, 512, 1024)]), Some(0));
        assert_eq!(first(&[mark, report(0, 512, 1024), report(0, 512, 512)]), Some(2));
        // Totals of two devices say nothing about each other.
        assert_eq!(first(&[report(0, 512, 1024), report(1, 512, 512)]), Some(0));
        // Each report follows the other one: the lanes decide.
        assert_eq!(first(&[report(0, -512, 0), report(0, 512, 512)]), Some(0));
    }
}
