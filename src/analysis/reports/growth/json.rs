//! The growth of a device as JSON.

use memtrace_trace::units::Unit;
use serde_json::{Value, json};

use super::LevelGrowth;
use super::forecast::Forecast;
use super::part::GrowthPart;
use crate::state::levels::Level;

/// The maximum number of levels in the JSON of a device, in addition to the last level.
const MOST_POINTS: usize = 200;

impl LevelGrowth {
    pub(in super::super) fn json(&self, units: Unit) -> Value {
        let measured = &self.measured;
        let named = |parts: &[i64; 4]| -> Value {
            GrowthPart::ALL
                .into_iter()
                .map(|part| (part.key().to_owned(), Value::from(parts[part as usize])))
                .collect()
        };
        let level = |at: usize| {
            let Level { step, ts_ns, inputs, peak, .. } = measured.levels()[at];
            let step = if measured.is_by_time() { Value::Null } else { step.into() };
            let used = measured.levels()[at].used();
            json!({
                "step": step, "ts_ns": ts_ns, "used_bytes": used, "peak_allocated_bytes": peak,
                "input_bytes": inputs, "parts_bytes": named(&measured.parts()[at]),
            })
        };
        let end = measured.levels().len() - 1;
        let every = measured.levels().len().div_ceil(MOST_POINTS).max(1);
        let points: Vec<Value> = (0..=end).filter(|at| at % every == 0 || *at == end).map(level).collect();
        let growth = GrowthPart::ALL.map(|part| measured.bytes_of(part));
        let used = measured.last().used();
        let (kind, rate, full_at, stays_at) = match self.forecast {
            Forecast::Jumped { .. } => ("jumped", None, None, Some(used)),
            Forecast::Settled => ("settled", None, None, Some(used)),
            Forecast::Paused { .. } => ("paused", None, None, None),
            Forecast::Varies { .. } => ("varies", None, None, None),
            Forecast::Swings { high, is_rising, .. } => ("swings", None, None, (!is_rising).then_some(high)),
            Forecast::Slowing { level } => ("slowing", None, None, level),
            Forecast::WithinCache { rate, until } => ("within_cache", Some(rate), Some(until), None),
            Forecast::Grows { rate, full_at, .. } => ("grows", Some(rate), full_at, None),
        };
        let forecast = measured.cause().map(|_| {
            let unit = if measured.is_by_time() { "second" } else { "step" };
            json!({ "kind": kind, "bytes_per_unit": rate, "unit": unit, "full_at": full_at, "level_bytes": stays_at })
        });
        json!({
            "device": measured.ordinal(),
            "from": level(measured.from()),
            "to": level(end),
            "to_is_inside_a_step": measured.is_cut(),
            "growth_bytes": measured.bytes(),
            "growth_parts_bytes": named(&growth),
            "cause": measured.cause().map(GrowthPart::key),
            "why": measured.cause().map(|part| self.why(part, units)),
            "remedy": measured.cause().map(|part| self.remedy(part)),
            "changes": self.changes.json(),
            "forecast": forecast,
            "levels": points,
        })
    }
}
