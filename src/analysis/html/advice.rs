//! The section `memtrace advise` of the page: the changes that lower a track's peak most, with the predicted
//! curve of each.

use serde_json::{Value, json};

use super::pack::Pack;
use crate::error::Result;
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::state::replay_trace::Replayed;
use crate::state::series::TimeGrid;
use crate::whatif::{Change, Prediction, Predictor, advice, sureness_in};

/// The maximum number of changes per track.
const MOST: usize = 5;
/// One bucket of a predicted curve covers this many time buckets of the measured curve.
pub(super) const CURVE: usize = 8;
/// The maximum number of rows of one step that are kept at once: about 100 MB.
const MOST_ROWS: usize = 500_000;

/// The predictions for the devices of a trace, made while its rows are read.
pub(super) struct TraceAdvice<'a> {
    trace: &'a TraceFile,
    options: &'a Options,
    /// The lists of changes to try, with one change each.
    lists: &'a [Vec<Change>],
    predictor: Predictor<'a>,
}

impl<'a> TraceAdvice<'a> {
    /// Prepares the predictions for `lists`, with a curve for each device of `grids`. Returns `None` if there
    /// is no change to try.
    pub(super) fn new(
        trace: &'a TraceFile,
        options: &'a Options,
        lists: &'a [Vec<Change>],
        grids: impl Iterator<Item = (i32, TimeGrid)>,
    ) -> Option<TraceAdvice<'a>> {
        let mut predictor = Predictor::new(trace, lists, options, MOST_ROWS);
        for (device, grid) in grids {
            let width_ns = grid.width_ns.saturating_mul(CURVE as i64);
            predictor = predictor
                .with_curves(device, TimeGrid { width_ns, buckets: grid.buckets.div_ceil(CURVE), ..grid });
        }
        (!lists.is_empty()).then_some(TraceAdvice { trace, options, lists, predictor })
    }

    /// Returns the predictor, to which the rows must be fed.
    pub(super) fn predictor(&mut self) -> &mut Predictor<'a> {
        &mut self.predictor
    }

    /// Returns the predictions of all devices.
    ///
    /// # Errors
    /// When the trace lacks the data for a prediction.
    pub(super) fn finish(self, replayed: &Replayed) -> Result<FoundAdvice<'a>> {
        let predictions = self.predictor.finish(self.trace, replayed, self.options)?;
        Ok(FoundAdvice { lists: self.lists, predictions })
    }
}

/// The predictions for the devices of a trace.
pub(super) struct FoundAdvice<'a> {
    lists: &'a [Vec<Change>],
    predictions: Vec<Prediction>,
}

impl FoundAdvice<'_> {
    /// Returns the changes of a device as JSON, ordered by the saved bytes, with their curves in `pack`.
    pub(super) fn json(&self, device: i32, replayed: &Replayed, pack: &mut Pack) -> Vec<Value> {
        let Some(prediction) = self.predictions.iter().find(|each| each.device == device) else {
            return Vec::new();
        };
        let ranked = prediction.ranked(self.lists.iter().map(|list| &list[0])).into_iter().take(MOST);
        ranked
            .map(|(index, outcome, saved)| {
                let change = &self.lists[index][0];
                let about = sureness_in(change, &replayed.replay);
                let curve = &prediction.curves[index].high;
                json!({
                    "change": change.option(),
                    "peak": replayed.moment(&outcome.peak),
                    "saved_bytes": saved,
                    "assumes": about.assumes,
                    "sure": about.word,
                    "costs": advice(change, &outcome.again).costs,
                    "high": pack.column(curve.iter().copied()),
                })
            })
            .collect()
    }
}
