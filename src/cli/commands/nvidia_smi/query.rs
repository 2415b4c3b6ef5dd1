//! The queries that answer with CSV.

use jiff::Zoned;

use super::arguments::Format;
use super::fields::Field;
use super::machines::Measured;
use super::value::{self, Value};

/// `--query-gpu`: a line for each card.
pub(super) fn gpus(
    measured: &Measured,
    cards: &[usize],
    fields: &[&Field],
    format: Format,
    header: bool,
) -> String {
    let now = Zoned::now();
    let lines = cards.iter().map(|&card| {
        let values = fields.iter().map(|field| value::of_card(measured, card, field.names[0], &now));
        line(values, format)
    });
    head(fields, header) + &lines.collect::<String>()
}

/// `--query-compute-apps`: a line for each process on a card.
pub(super) fn apps(
    measured: &Measured,
    cards: &[usize],
    fields: &[&Field],
    format: Format,
    header: bool,
) -> String {
    let now = Zoned::now();
    let apps = value::apps(measured, cards);
    let lines = apps.iter().map(|app| {
        let values = fields.iter().map(|field| value::of_app(measured, app, field.names[0], &now));
        line(values, format)
    });
    head(fields, header) + &lines.collect::<String>()
}

fn line(values: impl Iterator<Item = Value>, format: Format) -> String {
    values.map(|value| value.csv(format.units)).collect::<Vec<_>>().join(", ") + "\n"
}

/// The first line: the names of the fields, with their units.
fn head(fields: &[&Field], header: bool) -> String {
    if !header {
        return String::new();
    }
    let name = |field: &&Field| match field.unit {
        "" => field.names[0].to_owned(),
        // `nounits` leaves the units of the header.
        unit => format!("{} [{unit}]", field.names[0]),
    };
    fields.iter().map(name).collect::<Vec<_>>().join(", ") + "\n"
}
