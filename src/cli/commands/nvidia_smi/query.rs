//! The queries that answer with CSV.

use jiff::Zoned;

use super::arguments::Format;
use super::fields::Field;
use super::machines::Measured;
use super::value::{self, Value};

/// Returns the answer to `--query-gpu`: a line for each card.
pub(super) fn gpus(
    measured: &Measured,
    cards: &[usize],
    fields: &[&Field],
    format: Format,
    header: bool,
) -> String {
    csv(cards, fields, format, header, |&card, field, now| value::of_card(measured, card, field, now))
}

/// Returns the answer to `--query-compute-apps`: a line for each process on a card.
pub(super) fn apps(
    measured: &Measured,
    cards: &[usize],
    fields: &[&Field],
    format: Format,
    header: bool,
) -> String {
    let apps = value::apps(measured, cards);
    csv(&apps, fields, format, header, |app, field, now| value::of_app(measured, app, field, now))
}

/// Returns the header, if it is requested, and a line for each subject.
fn csv<T>(
    subjects: &[T],
    fields: &[&Field],
    format: Format,
    header: bool,
    value_of: impl Fn(&T, &str, &Zoned) -> Value,
) -> String {
    let now = Zoned::now();
    let line = |subject| {
        let values = fields.iter().map(|field| value_of(subject, field.names[0], &now).csv(format.units));
        values.collect::<Vec<_>>().join(", ") + "\n"
    };
    head(fields, header) + &subjects.iter().map(line).collect::<String>()
}

/// Returns the header: the names of the fields with their units. Empty if `header` is false.
fn head(fields: &[&Field], header: bool) -> String {
    if !header {
        return String::new();
    }
    let name = |field: &&Field| match field.unit {
        "" => field.names[0].to_owned(),
        // The header has units even with `nounits`, as in nvidia-smi.
        unit => format!("{} [{unit}]", field.names[0]),
    };
    fields.iter().map(name).collect::<Vec<_>>().join(", ") + "\n"
}
